"""Packed forwards: several sequences and trees at once give each sequence's own numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.models.packed import PackedModel, Segment
from draftsmith.models.sequence_cache import SequenceCache, cached_attention, causal_mask

FAMILIES = ["llama", "llama_tied", "qwen2", "qwen3", "gemma2", "gemma3", "granite", "phi"]
FAMILIES += ["gpt_neox", "gpt2", "qwen3_moe"]
RECURRENT_FAMILIES = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(4, 60, shape, generator=torch.Generator().manual_seed(seed))


def plain(target: Any, tokens: Tensor) -> Tensor:
    """[n, vocab] logits of one sequence by the model's own forward."""
    return target.forward(tokens[None], logits="all").logits[0]


def assert_close(found: Tensor, expected: Tensor, *, tolerance: float = 2e-5) -> None:
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def prefill(model: PackedModel, prompts: list[Tensor], room: int = 40) -> list[SequenceCache]:
    caches = [model.new_cache(len(prompt) + room) for prompt in prompts]
    model.forward([Segment(c, p, 0) for c, p in zip(caches, prompts, strict=True)])
    for cache, prompt in zip(caches, prompts, strict=True):
        cache.keep(range(len(prompt)))
    return caches


@pytest.mark.parametrize("family", FAMILIES + RECURRENT_FAMILIES)
def test_sequences_of_different_lengths_share_a_forward(
    family: str, tiny_target: Callable[..., Any]
) -> None:
    """Gemma's windows of 8 are shorter than these texts."""
    target = tiny_target(family)
    tolerance = 1e-4 if target.mixers else 2e-5  # A state sums over the whole text.
    model = PackedModel(target)
    texts = [ids(length, seed=length) for length in (17, 3, 9)]
    caches = prefill(model, [text[:-2] for text in texts])
    new = [2, 1, 2]
    segments = [
        Segment(cache, text[len(text) - 2 :][:count], len(text) - 2)
        for cache, text, count in zip(caches, texts, new, strict=True)
    ]
    output = model.forward(segments, aux_layer_ids=(0, 2), logits="all")
    assert output.logits is not None
    first = 0
    for text, count in zip(texts, new, strict=True):
        read = text[: len(text) - 2 + count]
        whole = target.forward(read[None], aux_layer_ids=(0, 2), logits="all")
        rows = slice(first, first + count)
        assert_close(output.logits[0, rows], whole.logits[0, -count:], tolerance=tolerance)
        assert_close(
            output.aux_hidden_states[0, rows],
            whole.aux_hidden_states[0, -count:],
            tolerance=tolerance,
        )
        assert_close(
            output.final_hidden_states[0, rows],
            whole.final_hidden_states[0, -count:],
            tolerance=tolerance,
        )
        first += count


@pytest.mark.parametrize("family", FAMILIES)
def test_every_node_of_a_tree_reads_its_own_path_only(
    family: str, tiny_target: Callable[..., Any]
) -> None:
    """I11, I12: a 2 x 2 tree below a root, compared node by node with a chain run of its path."""
    target = tiny_target(family)
    model = PackedModel(target)
    prompt, tree = ids(11, seed=1), ids(7, seed=2)
    parents = [-1, 0, 0, 1, 1, 2, 2]  # root, two children, two below each
    (cache,) = prefill(model, [prompt])
    depths, paths = [], []
    ancestors = torch.zeros(7, 7, dtype=torch.bool)
    for node, parent in enumerate(parents):
        path = [node] if parent < 0 else [*paths[parent], node]
        paths.append(path)
        depths.append(len(path) - 1)
        ancestors[node, path] = True
    segment = Segment(cache, tree, 11, 11 + torch.tensor(depths), ancestors)
    other = prefill(model, [ids(5, seed=3)])[0]
    logits = model.forward([segment, Segment(other, tree[:1], 5)], logits="all").logits
    assert logits is not None
    for node, path in enumerate(paths):
        assert_close(logits[0, node], plain(target, torch.cat([prompt, tree[path]]))[-1])
    # The accepted path is compacted: going on from it equals reading it afresh.
    cache.keep(paths[5])
    assert cache.committed == 11 + 3
    more = ids(2, seed=4)
    found = model.forward([Segment(cache, more, cache.committed)], logits="all").logits
    assert found is not None
    assert_close(found[0], plain(target, torch.cat([prompt, tree[paths[5]], more]))[-2:])


def test_a_flipped_sibling_changes_no_other_branch(tiny_target: Callable[..., Any]) -> None:
    """I11."""
    model = PackedModel(tiny_target("llama"))
    (cache,) = prefill(model, [ids(6)])
    ancestors = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    positions = torch.tensor([6, 7, 7])
    tokens = torch.tensor([5, 6, 7])
    before = model.forward([Segment(cache, tokens, 6, positions, ancestors)], logits="all").logits
    tokens = torch.tensor([5, 60, 7])
    after = model.forward([Segment(cache, tokens, 6, positions, ancestors)], logits="all").logits
    assert before is not None
    assert after is not None
    assert torch.equal(before[0, [0, 2]], after[0, [0, 2]])
    assert not torch.equal(before[0, 1], after[0, 1])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_both_attention_implementations_are_read_alike(
    implementation: str, tiny_folder: Callable[..., Any]
) -> None:
    from draftsmith.models.target import TargetModel

    folder = str(tiny_folder("llama"))
    target = TargetModel.load(folder, dtype="float32", attn_implementation=implementation)
    model = PackedModel(target)
    (cache,) = prefill(model, [ids(6)])
    found = model.forward([Segment(cache, ids(3, seed=5), 6)], logits="all").logits
    assert found is not None
    assert_close(found[0], plain(target, torch.cat([ids(6), ids(3, seed=5)]))[-3:])
    assert target.model.config._attn_implementation == implementation, "put back afterwards"


def test_flash_attention_is_replaced_with_a_note(
    tiny_folder: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """I11: flash kernels take no tree mask; what the target was loaded with must not matter."""
    from draftsmith.models.target import TargetModel

    target = TargetModel.load(str(tiny_folder("llama")), dtype="float32")
    for module in target.model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = "flash_attention_2"
    real_forward = target.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        kinds = {target.model.config._attn_implementation}
        if kinds == {"flash_attention_2"}:  # This machine has no flash kernels.
            target.model.config._attn_implementation_internal = "sdpa"
            try:
                return real_forward(*args, **kwargs)
            finally:
                target.model.config._attn_implementation_internal = "flash_attention_2"
        return real_forward(*args, **kwargs)

    target.forward = forward  # type: ignore[method-assign]
    PackedModel(target)
    assert "flash kernels take no tree masks" in caplog.text


def test_a_model_with_attention_of_its_own_is_refused(tiny_folder: Callable[..., Any]) -> None:
    from draftsmith.models.target import TargetModel

    target = TargetModel.load(str(tiny_folder("llama")), dtype="float32")
    target._takes_positions = False  # As a model that counts positions by itself.
    with pytest.raises(ValueError, match="other logits when sequences are packed"):
        PackedModel(target)


def test_cached_attention_equals_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    for new, total in ((1, 5), (4, 9), (130, 140), (130, 130)):
        query = torch.randn(new, 4, 8, generator=generator)
        keys = torch.randn(2, total, 8, generator=generator)
        values = torch.randn(2, total, 6, generator=generator)
        mask = torch.rand(new, total, generator=generator) < 0.5
        mask[:, 0] = True
        for keep in (None, mask):
            for softcap in (None, 2.0):
                scores = torch.einsum("nhd,htd->hnt", query, keys.repeat_interleave(2, 0)) * 0.3
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                seen = causal_mask(new, total, query.device) if keep is None else keep
                probs = scores.masked_fill(~seen, float("-inf")).softmax(-1)
                expected = torch.einsum("hnt,htd->nhd", probs, values.repeat_interleave(2, 0))
                found = cached_attention(
                    query, keys, values, keep_mask=keep, scale=0.3, softcap=softcap
                )
                assert_close(found, expected)


def test_growing_and_compacting_keep_every_entry() -> None:
    cache = SequenceCache()
    entries = torch.randn(2, 10, 4)
    cache.reserve(6, limit=100)
    cache.capacity = 6
    cache.write(0, 0, entries[:, :6], -entries[:, :6])
    cache.keep(range(3))
    cache.reserve(10, limit=100)
    cache.write(0, 6, entries[:, 6:], -entries[:, 6:])
    cache.keep([1, 4, 6])  # Rows after the three committed ones: entries 4, 7, 9.
    assert cache.committed == 6
    assert torch.equal(cache.keys[0][:, :6], entries[:, [0, 1, 2, 4, 7, 9]])
    assert torch.equal(cache.values[0][:, :6], -entries[:, [0, 1, 2, 4, 7, 9]])
