"""What several processes share out and agree on: rows, wishes, results; and what DeepSpeed's settings may say."""

from __future__ import annotations

import json
import multiprocessing
import re
import shlex
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from torch.distributed.run import get_args_parser
from torch.utils.data import DataLoader

from medusa import configs
from medusa.errors import UserError
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.testing import tiny_trunk
from medusa.train.checkpoints import Saved
from medusa.train.cli import read_config, run
from medusa.train.config import TrainConfig, TrunkConfig
from medusa.train.distributed import ALONE, Group, joined
from medusa.train.loop import HeadsObjective
from medusa.train.shared import Unheard
from medusa.train.training import HeadsTraining, JointTraining, Training
from medusa.train.zero import held_in_parts, read_settings, started, whole_copy

ZERO2, ZERO3 = ({"zero_optimization": {"stage": stage}} for stage in (2, 3))


@pytest.mark.parametrize(("batch", "accumulate", "size", "rows"), [(8, 1, 1, 8), (8, 2, 2, 2), (12, 3, 4, 1)])
def test_a_batch_is_that_of_all_processes(batch: int, accumulate: int, size: int, rows: int) -> None:
    assert Group(size=size).rows(Training(batch=batch, accumulate=accumulate)) == rows


def test_rows_that_cannot_be_shared_out_are_refused_with_the_numbers() -> None:
    with pytest.raises(UserError, match=r"batch=8 .* processes=3 in accumulate=2 .* multiple of 6"):
        Group(size=3).rows(Training(batch=8, accumulate=2))


@pytest.mark.parametrize(("size", "accumulate"), [(1, 4), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_a_step_has_the_same_rows_whatever_the_number_of_processes(size: int, accumulate: int) -> None:
    training = Training(batch=8, accumulate=accumulate, steps=3)
    batch = Group(size=size).rows(training)
    dealt = []
    for rank in range(size):  # as the Trainer and accelerate deal them out
        loader = DataLoader(range(training.steps * training.batch), batch_size=batch, shuffle=False)  # type: ignore[arg-type]
        prepared = prepare_data_loader(loader, torch.device("cpu"), num_processes=size, process_index=rank)
        dealt.append([part.tolist() for part in prepared.base_dataloader])
    for step in range(training.steps):
        parts = [part for process in dealt for part in process[step * accumulate : (step + 1) * accumulate]]
        wanted = list(range(step * training.batch, (step + 1) * training.batch))
        assert sorted(row for part in parts for row in part) == wanted


def test_what_deepspeed_cannot_train_is_refused_by_name() -> None:
    group = Group(deepspeed=ZERO2)
    group.check("heads", Training(optimizer="adamw"))
    group.check("joint", JointTraining())
    with pytest.raises(UserError, match="trunk: optimizer=muon with deepspeed"):
        group.check("trunk", Training(optimizer="muon"))
    with pytest.raises(UserError, match=r"joint with ZeRO-3: .* use deepspeed=zero2"):
        Group(deepspeed=ZERO3).check("joint", JointTraining())
    ALONE.check("trunk", Training(optimizer="muon"))


def test_a_checkpoint_in_parts_is_for_as_many_processes() -> None:
    def saved(kind: str) -> Saved:
        return Saved(Path("there"), 3, {}, 0.0, {}, {}, {}, kind)

    two = Group(size=2, deepspeed=ZERO2)
    two.check_saved(saved(two.kind))
    Group(size=2).check_saved(saved(ALONE.kind))  # whole weights: any number goes on
    for other in (Group(size=4, deepspeed=ZERO2), Group(size=2, deepspeed=ZERO3), Group(size=2)):
        with pytest.raises(UserError, match="there was made with ZeRO-2 and processes=2, now it goes on"):
            other.check_saved(saved(two.kind))


def test_the_settings_that_ship_are_read() -> None:
    for number in (2, 3):
        settings = read_settings(f"zero{number}")
        assert settings["zero_optimization"]["stage"] == number
        assert held_in_parts(settings) == (number == 3)
    assert held_in_parts(ZERO2 | {"bf16": {"enabled": True}}) and not held_in_parts(None)
    assert not any(name.startswith("zero") for name in configs.names())


def test_settings_that_are_not_there_name_the_nearest() -> None:
    with pytest.raises(UserError, match=r"deepspeed=zero: .*did you mean zero[23]\?.*zero2, zero3"):
        read_settings("zero")
    with pytest.raises(UserError, match=r"deepspeed=gone.json: there is no such file"):
        read_settings("gone.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": {"type": "Adam"}}, "'optimizer', which is the recipe's to say"),
        ({"train_batch_size": 8}, "train_batch_size=8, which is the recipe's to say: give 'auto'"),
        ({"zero_optimization": {"stage": 7}}, "no zero_optimization.stage"),
        ({"fp16": {"enabled": True}}, "use bf16"),
    ],
)
def test_settings_that_contradict_the_recipe_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(json.loads(configs.deepspeed("zero2").read_text()) | change))
    with pytest.raises(UserError, match=message):
        read_settings(str(path))
    path.write_text("{")
    with pytest.raises(UserError, match="can't be read as JSON"):
        read_settings(str(path))


def test_an_unknown_option_near_deepspeed_is_told() -> None:
    with pytest.raises(UserError, match="did you mean deepspeed"):
        read_config(["tinyshakespeare", "--deepsped", "zero2"])
    assert read_config(["tinyshakespeare", "--deepspeed", "zero3"])[0].deepspeed == "zero3"


def test_one_process_of_a_machine_tells_of_a_wrong_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run("train", ["nosuchrecipe"]) == 2
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UserError):
        run("train", ["nosuchrecipe"])


def test_a_process_alone_has_nobody_to_ask() -> None:
    assert ALONE.first(lambda: 3) == 3 and ALONE.alone(lambda: 4) == 4 and ALONE.in_turn(lambda: 5) == 5
    assert ALONE.any((True, False), torch.device("cpu")) == (True, False)
    assert ALONE.sum(torch.tensor(2.0)) == 2
    with joined(TrainConfig("run", trunk=TrunkConfig(name="some/trunk"))) as group:
        assert group is ALONE


def test_a_log_that_nobody_hears_writes_nothing(tmp_path: Path) -> None:
    log = Unheard(tmp_path)
    log.begin("heads")
    log.write("heads", 1, {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_a_copy_shares_the_trunk_and_nothing_that_is_trained() -> None:
    heads = MedusaHeads(HeadsConfig("hydra", num=2), tiny_trunk("llama"))
    objective = HeadsObjective(heads, HeadsTraining())
    copied = whole_copy(objective, [heads.trunk])
    assert copied.heads.trunk is heads.trunk
    mine, theirs = (dict(each.named_parameters()) for each in (objective, copied))
    assert mine.keys() == theirs.keys()
    assert all(mine[name].equal(theirs[name]) and mine[name] is not theirs[name] for name in mine)


def _process(rank: int, size: int, folder: str, work: Callable[[Group], Any], found: Any) -> None:
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        found.put((rank, work(Group(rank, size, rank))))
    finally:
        dist.destroy_process_group()


def together(work: Callable[[Group], Any], folder: Path, size: int = 2) -> list[Any]:
    """What ``work`` gives on each of ``size`` processes."""
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    started = [context.Process(target=_process, args=(rank, size, str(folder), work, found)) for rank in range(size)]
    for process in started:
        process.start()
    results = dict(found.get(timeout=60) for _ in started)
    for process in started:
        process.join(60)
        assert process.exitcode == 0
    return [results[rank] for rank in range(size)]


def _told(group: Group) -> Any:
    def refuse() -> None:
        raise UserError("no such trunk")

    nested = group.first(lambda: (group.first(lambda: group.rank), group.sum(torch.tensor(1.0)).item()))
    kept = group.alone(lambda: object())
    try:
        group.first(refuse)
    except UserError as error:
        return nested, kept is None, str(error), group.several
    return None


def test_what_the_first_finds_all_are_told_its_errors_too(tmp_path: Path) -> None:
    first, second = together(_told, tmp_path)
    assert first == ((0, 1.0), False, "no such trunk", True)  # within its work it was as if alone
    assert second == ((0, 1.0), True, "no such trunk", True)


def _agreed(group: Group) -> Any:
    wishes = group.any((group.rank == 1, False), torch.device("cpu"))
    return wishes, group.sum(torch.tensor([1.0 + group.rank], dtype=torch.float64)).tolist()


def test_a_wish_of_one_is_that_of_all_and_sums_are_of_all(tmp_path: Path) -> None:
    assert together(_agreed, tmp_path) == [((True, False), [3.0])] * 2


def _in_turn(folder: Path, group: Group) -> Any:
    def fetch() -> str:
        place = folder / "fetched"
        if not place.exists():
            place.write_text(f"by {group.rank}")
        return place.read_text()

    return group.in_turn(fetch)


def test_what_one_fetches_the_others_find(tmp_path: Path) -> None:
    assert together(partial(_in_turn, tmp_path), tmp_path) == ["by 0"] * 2


DOCS = Path(__file__).resolve().parents[2] / "docs" / "distributed.md"


def documented(launcher: str) -> list[list[str]]:
    blocks = re.findall(r"^```\n(.*?)^```$", DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith(f"{launcher} ")]
    return [shlex.split(line)[1:] for line in lines]


def assert_understood(argv: list[str]) -> None:
    if argv[0] == "generate":  # that command's own options; e2e/test_tensor_parallel.py runs it
        assert argv[-2:] == ["--tp-plan", "auto"]
        return
    assert argv[0] == "train"
    read_config(argv[1:])


@pytest.mark.parametrize("options", documented("torchrun"))
def test_what_the_page_gives_torchrun_reaches_us(options: list[str]) -> None:
    args = get_args_parser().parse_args(options)
    assert args.module and args.training_script == "medusa"
    assert_understood(args.training_script_args)


@pytest.mark.parametrize("options", documented("deepspeed"))
def test_what_the_page_gives_deepspeed_reaches_us(options: list[str]) -> None:
    start = options.index("medusa")
    assert options[start - 2 : start] == ["--no_local_rank", "--module"]
    assert_understood(options[start + 1 :])


def test_torchrun_needs_the_dashes_that_the_page_gives() -> None:
    with pytest.raises(SystemExit):
        get_args_parser().parse_args(["-m", "medusa", "train", "tinyshakespeare", "--run", "there"])
    assert len(documented("torchrun")) >= 4 and len(documented("deepspeed")) >= 2


def _aligned(group: Group) -> Any:
    torch.manual_seed(group.rank)
    module = torch.nn.Linear(3, 2)
    group.align(module, torch.device("cpu"))
    return module.weight.tolist(), module.bias.tolist()


def test_all_start_with_the_first_ones_values(tmp_path: Path) -> None:
    first, second = together(_aligned, tmp_path)
    torch.manual_seed(0)
    assert first == second and first[0] == torch.nn.Linear(3, 2).weight.tolist()


def test_deepspeed_that_is_missing_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UserError, match=r"pip install 'medusa-decoding\[distributed\]'"), started(torch.device("cpu")):
        pass
