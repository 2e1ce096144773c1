"""draftsmith-profile and the curve that it writes: look-ups by hand, forwards as the engine's."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.conf.entry import compose_settings
from draftsmith.eval import profiling
from draftsmith.eval.curve import StepsPerSecond
from draftsmith.eval.profiling import measure_curve, run, spread_tokens
from draftsmith.inference.scheduler import schedule
from draftsmith.models.packed import PackedModel

SCHEMA = "draftsmith.conf.schema_serving:ProfileConfig"


def curve_of(rows: Sequence[Sequence[float]], counts: Sequence[int], contexts: Sequence[int]):  # noqa: ANN201
    """A curve whose medians are `rows`: three timings each, of which one is an outlier."""
    seconds = [[[one * 0.9, one, one * 50] for one in row] for row in rows]
    return StepsPerSecond(counts, contexts, seconds, [1] * len(counts), {"target": "made up"})


# ---- the curve ------------------------------------------------------------------------------


def test_raw_curve_and_envelope_are_both_kept() -> None:
    """The dent at 2 tokens: 4 tokens take less time, so 2 could be filled up to 4."""
    curve = curve_of([[0.1, 0.25, 0.2, 0.4]], [1, 2, 4, 8], [16])
    assert curve.median_seconds == [[0.1, 0.25, 0.2, 0.4]]
    assert curve.minimum_seconds[0] == pytest.approx([0.09, 0.225, 0.18, 0.36])
    assert curve.steps_per_second[0] == pytest.approx([10.0, 4.0, 5.0, 2.5])
    assert curve.envelope[0] == pytest.approx([10.0, 5.0, 5.0, 2.5])
    assert curve.sps(2, 16, raw=True) == pytest.approx(4.0)
    assert curve.sps(2, 16) == pytest.approx(5.0)


def test_seconds_are_interpolated_in_tokens_and_in_context() -> None:
    curve = curve_of([[0.1, 0.2], [0.3, 0.6]], [1, 3], [100, 200])
    assert curve.sps(2, 100) == pytest.approx(1 / 0.15)
    assert curve.sps(1, 150) == pytest.approx(1 / 0.2)
    assert curve.sps(2, 175) == pytest.approx(1 / (0.25 * 0.15 + 0.75 * 0.45))
    assert curve.sps(3, 7) == pytest.approx(1 / 0.2), "short contexts count as the shortest"
    assert curve.rates(150) == pytest.approx([1 / 0.2, 1 / 0.3, 1 / 0.4])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.001, 10.0), min_size=4, max_size=4), min_size=2, max_size=2),
    st.floats(1.0, 300.0),
)
def test_envelope_falls_and_lies_on_or_above_the_raw_curve(
    rows: list[list[float]], context: float
) -> None:
    curve = curve_of(rows, [1, 2, 5, 9], [50, 300])
    rates, raw = curve.rates(context), curve.rates(context, raw=True)
    assert len(rates) == curve.max_tokens == 9
    assert all(b <= a * (1 + 1e-12) for a, b in zip(rates, rates[1:], strict=False))
    assert all(a >= b * (1 - 1e-12) for a, b in zip(rates, raw, strict=True))
    assert rates == [curve.sps(count, context) for count in range(1, 10)]


def test_what_was_not_measured_is_refused() -> None:
    curve = curve_of([[0.1, 0.2]], [1, 3], [100])
    for tokens in (0, 4):
        with pytest.raises(ValueError, match="measured from 1 to 3"):
            curve.sps(tokens, 100)
    with pytest.raises(ValueError, match=r"context of 101 tokens: .* up to 100"):
        curve.rates(101)
    with pytest.raises(ValueError, match="ascending list from 1"):
        curve_of([[0.1, 0.2]], [2, 3], [100])
    with pytest.raises(ValueError, match="expected an ascending list >= 1"):
        curve_of([[0.1], [0.1]], [1], [200, 100])
    with pytest.raises(ValueError, match="expected 2 rows of 1"):
        curve_of([[0.1]], [1], [100, 200])
    with pytest.raises(ValueError, match="not positive"):
        curve_of([[0.0]], [1], [100])


def test_files_that_are_no_curve_are_named(tmp_path: Path) -> None:
    for name, text in (("a", "{}"), ("b", "[1]"), ("c", "no json")):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=f"{name} is no steps-per-second curve"):
            StepsPerSecond.load(path)
    with pytest.raises(ValueError, match="missing is no steps-per-second curve"):
        StepsPerSecond.load(tmp_path / "missing")


# ---- measuring ------------------------------------------------------------------------------


def test_tokens_are_spread_evenly_over_as_few_requests_as_allowed() -> None:
    assert [spread_tokens(count, 3) for count in range(1, 8)] == [
        [1], [2], [3], [2, 2], [3, 2], [3, 3], [3, 2, 2],
    ]  # fmt: skip
    assert spread_tokens(4, 1) == [1, 1, 1, 1]


def test_every_kind_is_timed_as_often_and_kinds_take_turns(
    tiny_target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the target is given: sizes, contexts, order; one pass of them is untimed."""
    target = tiny_target("llama")
    seen: list[tuple[int, tuple[int, ...]]] = []
    real = PackedModel.forward

    def watched(self: PackedModel, segments: Any, **options: Any) -> Any:
        caches = {id(segment.cache) for segment in segments}
        assert len(caches) == len(segments), "every request has a cache of its own"
        found = real(self, segments, **options)
        if options.get("logits") == "all":
            seen.append((segments[0].start, tuple(segment.new for segment in segments)))
            assert all(one.start == one.cache.committed == seen[-1][0] for one in segments)
            assert found.logits.shape == (1, sum(seen[-1][1]), target.vocab_size)
        return found

    PackedModel.of(target)  # Its own trial is over.
    monkeypatch.setattr(PackedModel, "forward", watched)
    curve = measure_curve(
        target, token_counts=[1, 2, 5], context_lengths=[4, 9], tokens_per_request=2, repeats=3
    )
    kinds = {(context, sizes) for context in (4, 9) for sizes in ((1,), (2,), (2, 2, 1))}
    passes = [seen[start : start + 6] for start in range(0, len(seen), 6)]
    assert len(passes) == 4
    assert all(set(one) == kinds for one in passes)
    assert passes[0] != passes[1]
    assert [[len(cell) for cell in row] for row in curve.seconds] == [[3] * 3] * 2
    assert list(curve.num_requests) == [1, 1, 3]


def test_timed_forwards_read_the_context_that_they_name(tiny_target: Any) -> None:
    """Logits behind a copied, shortened cache are those of the plain model on that prefix."""
    target = tiny_target("llama")
    with torch.inference_mode():
        forwards = profiling._Forwards(target, num_requests=3, context=9, room=2, seed=5)
        kept = {}

        def keep(segments: Any, **options: Any) -> Any:
            kept["output"] = real(segments, **options)
            return kept["output"]

        real = forwards._packed.forward
        forwards._packed = type("Kept", (), {"forward": staticmethod(keep)})()
        for context in (9, 4):  # The longer one leaves its entries behind the shorter one's mark.
            assert forwards.seconds([2, 1, 2], context) > 0.0
            tokens = forwards._tokens[: context + 2]
            expected = target.forward(tokens[None], logits="all").logits[0, context:]
            found = kept["output"].logits[0]
            torch.testing.assert_close(found[:2], expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(found[2:3], expected[:1], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(found[3:], expected, atol=1e-5, rtol=1e-5)


def test_a_context_beyond_the_targets_positions_is_refused(tiny_target: Any) -> None:
    with pytest.raises(ValueError, match=r"has 511, but the target has 512 .* at most 510"):
        measure_curve(
            tiny_target("llama"),
            token_counts=[1, 2],
            context_lengths=[511],
            tokens_per_request=2,
            repeats=1,
        )


# ---- the verb -------------------------------------------------------------------------------


def test_settings_are_checked_before_anything_is_loaded() -> None:
    base = ["target=smollm2", "output=out"]
    found = compose_settings("profile", SCHEMA, [*base, "token_counts=[4,1,2,2]"])
    assert found.token_counts == [1, 2, 4]
    for override, message in (
        ("token_counts=[2,4]", "the smallest must be 1"),
        ("token_counts=[0,1]", "the smallest must be 1"),
        ("context_lengths=[]", "name at least one"),
        ("context_lengths=[0]", "at least 1"),
        ("tokens_per_request=0", "at least 1"),
        ("repeats=0", "at least 1"),
        ("context_length=[3]", "context_lengths"),
    ):
        with pytest.raises(ValueError, match=message):
            compose_settings("profile", SCHEMA, [*base, override])


def test_the_verb_writes_a_curve_that_can_be_scheduled_with(
    tiny_llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        compose_settings(
            "profile",
            SCHEMA,
            [
                "target=local",
                f"target.name_or_path={tiny_llama_folder}",
                "target.dtype=float32",
                "target.device=cpu",
                "token_counts=[1,2,4,8]",
                "context_lengths=[8,24]",
                "repeats=2",
                f"output={tmp_path}/out",
            ],
        )
    )
    path = tmp_path / "out" / "profile.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["environment"]["dtype"] == "float32"
    assert found["environment"]["threads"] == torch.get_num_threads()
    assert set(found["environment"]["versions"]) >= {"torch", "transformers", "draftsmith"}
    assert set(found["fingerprint"]) == {"weights", "tokenizer", "chat_template"}
    assert set(found["definitions"]) <= set(found)
    curve = StepsPerSecond.load(path)
    assert curve.to_json() == found, "reading and writing lose nothing"
    assert found["envelope"] == curve.envelope
    assert found["num_requests"] == [1, 1, 1, 2]
    rates = curve.rates(16)
    assert len(rates) == 8
    assert sum(schedule([[1.0] * 3], rates)) <= 3
    table = (tmp_path / "out" / "profile.txt").read_text(encoding="utf-8")
    assert max(map(len, table.splitlines())) <= 120
    for text in (table, capsys.readouterr().out):
        assert f"{1000 * curve.median_seconds[1][3]:.2f}" in text
        assert "float32" in text
    page = (tmp_path / "out" / "profile.html").read_text(encoding="utf-8")
    assert page.count("<figure") == 3
    assert f"{curve.envelope[0][2]:.1f}" in page
    assert "<script" not in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
