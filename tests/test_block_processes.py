"""Block drafts over several processes: the same anchors, losses and steps as in one."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parent))

import block_support as block
import train_support as support

from draftsmith.models.dflash import DFlashMethod
from draftsmith.models.dspark import DSparkMethod
from draftsmith.models.target import TargetModel
from draftsmith.train.loop import count, seed_draws
from draftsmith.train.objectives import make_objective

SIZES: dict[str, Any] = {"num_hidden_layers": 1, "block_size": 4, "num_anchors": 8}
METHODS: dict[str, dict[str, Any]] = {
    "dflash": SIZES,
    "dspark": SIZES | {"markov_rank": 6, "sequential_head": "rnn"},
}
CLASSES = {"dflash": "dflash.DFlashMethod", "dspark": "dspark.DSparkMethod"}


@pytest.fixture(scope="module")
def inputs(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> support.Inputs:
    return support.make_inputs(tmp_path_factory.mktemp("inputs"), tiny)


def node(name: str) -> dict[str, Any]:
    """The method node of a run."""
    target = f"draftsmith.models.{CLASSES[name]}"
    return {"_target_": target, "aux_layer_ids": [0, 1, 2]} | METHODS[name]


def command(name: str, inputs: support.Inputs, *words: str) -> list[str]:
    """The command line of a run with the same method."""
    own = [f"method.{key}={value}" for key, value in METHODS[name].items()]
    start = [sys.executable, "-P", "-m", "draftsmith.train", f"method={name}"]
    return [*start, "method.aux_layer_ids=[0,1,2]", *own, *inputs.overrides, *words]


def assert_same_rows(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    """All numbers of all rows, timings aside."""
    assert [row["step"] for row in first] == [row["step"] for row in second]
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() - {"tokens_per_second"}:
            assert one[key] == pytest.approx(other[key], abs=1e-5), (one["step"], key)


def drawing_run(seed: int, step: int, processes: int, accumulation: int, rank: int) -> Any:
    """What `seed_draws` reads of a run."""
    return SimpleNamespace(
        settings=SimpleNamespace(train=SimpleNamespace(seed=seed)),
        plan=SimpleNamespace(world_size=processes, accumulation=accumulation),
        progress=SimpleNamespace(step=step),
        accelerator=SimpleNamespace(process_index=rank),
        draft=SimpleNamespace(normaliser=lambda _batch: torch.randperm(50)),
    )


def test_draws_belong_to_the_micro_batch_not_to_the_process() -> None:
    def drawn(run: Any, place: int) -> list[int]:
        torch.manual_seed(len(seen))  # Whatever was drawn before.
        found = count(run, place, None)  # type: ignore[arg-type]
        seed_draws(run, place)
        assert torch.equal(found, torch.randperm(50)), "normaliser and forward draw the same"
        return found.tolist()

    seen: list[list[int]] = []
    for step in range(2):
        alone = [drawn(drawing_run(3, step, 1, 4, 0), place) for place in range(4)]
        pairs = [drawn(drawing_run(3, step, 2, 2, n % 2), n // 2) for n in range(4)]
        apart = [drawn(drawing_run(3, step, 4, 1, rank), 0) for rank in range(4)]
        assert alone == pairs == apart
        seen += alone
    seen += [drawn(drawing_run(4, 0, 1, 4, 0), 0)]
    assert len({tuple(one) for one in seen}) == 9, "steps, places and seeds differ"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", METHODS)
def test_two_ddp_processes_take_the_steps_of_one(
    name: str, inputs: support.Inputs, tmp_path: Path
) -> None:
    common = ["train.epochs=2", "train.eval_every=4", "train.micro_batch_size=4"]
    settings = support.compose(inputs, "train.gradient_accumulation=2", *common, method=node(name))
    single = support.run_in_process(settings, tmp_path / "single")
    words = [*common, "launch=ddp", "launch.num_processes=2", f"run_dir={tmp_path / 'pair'}"]
    done = support.run_command(command(name, inputs, *words), tmp_path, timeout=500.0)
    assert done.returncode == 0, done.stderr
    assert_same_rows(single, support.read_metrics(tmp_path / "pair"))
    assert any("validation_simulated_accepted_length_rounds" in row for row in single)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_zero2_takes_the_steps_of_one_process_and_resumes(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    common = ["train.max_steps=6", "train.save_every=3", "train.micro_batch_size=4"]
    settings = support.compose(
        inputs, "train.gradient_accumulation=4", *common, method=node("dspark")
    )
    single = support.run_in_process(settings, tmp_path / "single")
    run_dir = tmp_path / "zero"
    words = [*common, "train.gradient_accumulation=2", "launch=zero2", "launch.num_processes=2"]
    line = command("dspark", inputs, *words, f"run_dir={run_dir}")
    done = support.run_command(line, tmp_path, timeout=500.0)
    assert done.returncode == 0, done.stderr
    assert_same_rows(single, support.read_metrics(run_dir))
    for folder in sorted((run_dir / "checkpoints").iterdir())[1:]:
        (folder / "COMPLETE").unlink()
    done = support.run_command([*line, "resume=auto"], tmp_path, timeout=500.0)
    assert done.returncode == 0, done.stderr
    assert "Going on from" in done.stdout
    assert_same_rows(single, support.read_metrics(run_dir))


# --- a process without a block --------------------------------------------------------------------


def gradients_of(draft: Any, model: Any, target: TargetModel, batch: Any) -> dict[str, Tensor]:
    """After one backward pass; every parameter has one."""
    name = "ce_l1" if draft.config.sample_from_anchor else "ce"
    draft.normaliser(batch)
    output = model(batch, target_head=target.head(), objective=make_objective(name))
    output.loss_sum.backward()
    return {name: parameter.grad.clone() for name, parameter in draft.named_parameters()}


def one_process(rank: int, port: str, folder: str, method: str, out: str) -> None:
    """One of two processes; only process 0 has candidates."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    draft, target, batch = prepared(folder, method)
    if rank == 1:
        batch.supervised_mask[:] = False
    model = DistributedDataParallel(draft)
    torch.save(gradients_of(draft, model, target, batch), f"{out}/{rank}.pt")
    # Once more: a reducer that still waits for a parameter would say so here.
    draft.zero_grad()
    gradients_of(draft, model, target, batch)
    # Freed before its processes' group: the other way round the second process hung in the end.
    del model
    dist.barrier()
    dist.destroy_process_group()


def prepared(folder: str, method: str) -> tuple[Any, TargetModel, Any]:
    target = TargetModel.load(folder, dtype="float32", device="cpu")
    kind = {"dflash": DFlashMethod, "dspark": DSparkMethod}[method]
    settings = METHODS[method] | {"num_anchors": 100}
    return block.make_draft(kind, target, **settings), target, block.make_batch(target)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_process_without_candidates_adds_zero_and_does_not_hang(
    method: str, tiny: ModuleType, tmp_path: Path
) -> None:
    folder = str(tiny.save_tiny_target(tmp_path / "target", "llama"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(port), folder, method, str(tmp_path)]
    started = [
        subprocess.Popen([sys.executable, __file__, str(rank), *words], env=support.environment())
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=250) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    draft, target, batch = prepared(folder, method)
    alone = gradients_of(draft, draft, target, batch)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, gradient in alone.items():
            torch.testing.assert_close(found[name], gradient / 2, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    one_process(int(sys.argv[1]), *sys.argv[2:])
