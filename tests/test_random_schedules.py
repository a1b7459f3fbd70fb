"""examples/random_schedules.py: a few schedules, and that it finds what is broken on purpose."""

import importlib
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from compiled_dsa import Batch, PagePool
from compiled_dsa.custom_ops.layout import PAGE
from compiled_dsa.pages import PageLedger

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("random_schedules")


@pytest.fixture(scope="module")
def schedules(example):
    return example.Schedules("glm_moe_dsa", device="cpu", dtype=torch.float64, graphs="off", backend="inductor", seed=0)


def test_tokens_are_those_of_each_request_alone(schedules):
    loops = [schedules.run(number) for number in (4, 9)]
    assert not any(loop.differences for loop in loops)
    counts = sum((loop.counts for loop in loops), start=Counter())
    happened = {"mixed steps", "decode steps", "verify steps", "ahead steps", "draft-extend steps", "forks",
                "adopted prefixes", "kept prefixes", "evicted pages", "moved pages", "preemptions", "confirmed drafts",
                "cropped drafts", "forwards without scores"}  # fmt: skip
    assert happened <= {name for name, count in counts.items() if count}


def test_a_number_stands_for_a_schedule(schedules):
    first, again = (schedules.run(1) for _ in range(2))  # whatever the pool held before
    for counts in (first.counts, again.counts):
        del counts["moved pages"]  # pages come in the order in which the schedule before left them
    assert first.counts == again.counts


# ---- what is broken is found -----------------------------------------------------------------------------------------


def crop_a_page_too_many(patch):
    crop = PagePool.crop

    def rounded_down(pool, request, kv_len):
        crop(pool, request, kv_len // PAGE * PAGE)
        pool._requests[request].tokens = kv_len

    patch.setattr(PagePool, "crop", rounded_down)


def write_into_shared_pages(patch):
    patch.setattr(PageLedger, "_page_to_copy", lambda *_: None)


def copy_nothing(patch):
    patch.setattr(PagePool, "_copy_pages", lambda *_: None)


def move_latents_alone(patch):
    def copy_pages(pool, from_pages, to_pages):
        for layer in pool.layers:
            layer.latents[to_pages] = layer.latents[from_pages]

    patch.setattr(PagePool, "_copy_pages", copy_pages)


def shift_a_row_of_the_page_table(patch):
    publish = PagePool._publish

    def shifted(pool, requests):
        publish(pool, requests)
        if 1 in requests:
            pool.page_table[1] = pool.page_table[1].roll(1)

    patch.setattr(PagePool, "_publish", shifted)


def adopt_by_length_alone(patch):
    loop = importlib.import_module("random_loop")
    patch.setattr(loop, "page_keys", lambda tokens: list(range(len(tokens) // 64)))


def see_one_key_too_many(patch):
    from_lengths = Batch.from_lengths.__func__

    def later(cls, *args, **kwargs):
        batch = from_lengths(cls, *args, **kwargs)
        batch.visible = torch.minimum(batch.visible + 1, batch.kv_len[batch.req_of_row.long()])
        return batch

    patch.setattr(Batch, "from_lengths", classmethod(later))


def skip_a_draft_step(patch):
    steps = Batch.steps
    patch.setattr(Batch, "steps", lambda batch, k, **options: steps(batch, k + 1, **options)[1:])


@pytest.mark.parametrize(
    ("broken", "number"),  # of a schedule in which it matters
    [
        (crop_a_page_too_many, 0),
        (write_into_shared_pages, 8),
        (copy_nothing, 0),
        (move_latents_alone, 0),
        (shift_a_row_of_the_page_table, 0),
        (adopt_by_length_alone, 4),
        (see_one_key_too_many, 0),
        (skip_a_draft_step, 0),
    ],
)
def test_what_is_broken_is_found(broken, number, schedules, monkeypatch):
    schedules.pool = schedules.new_pool()  # after a fault its books may be wrong
    broken(monkeypatch)
    assert schedules.run(number).differences


# ---- the program -----------------------------------------------------------------------------------------------------


def run(example, folder: Path, *options: str) -> tuple[int, dict]:
    """Exit status and figures."""
    figures = folder / "figures.json"
    status = example.main(["--json", str(figures), *options])
    (record,) = json.loads(figures.read_text())
    return status, record


def test_program(example, tmp_path, monkeypatch, capsys):
    copy_nothing(monkeypatch)
    status, stats = run(example, tmp_path, "--device", "cpu", "--schedules", "1")
    assert status == 1 and stats["equal"] == 0
    assert stats["dtype"] == "float64" and stats["near_ties"] == [] and stats["differences"]
    assert capsys.readouterr().out.splitlines()[-1] == "schedules equal: 0/1"


def test_near_ties(example):
    assert example.near_tie(2**-4, 1.0, torch.bfloat16) and example.near_tie(1.0, 2**-9, torch.bfloat16)
    assert not example.near_tie(2**-3, 2**-8, torch.bfloat16)
    assert not example.near_tie(1e-9, 1e-9, torch.float64) and not example.near_tie(1e-5, 1e-5, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["deepseek_v32", "glm_moe_dsa"])
def test_program_on_a_gpu_replays_graphs(model, example, tmp_path):
    status, stats = run(example, tmp_path, "--device", "cuda", "--model", model, "--schedules", "3", "--graphs", "auto")
    assert status == 0 and stats["equal"] == 3 and stats["dtype"] == "float32"
    graphs, sizes = stats["graph_stats"], len(example.TOKEN_SIZES) + 6 * len(example.BATCH_SIZES)
    assert graphs["graphs"] == "auto" and graphs["recompiles"] == graphs["uncaptured"] == 0
    assert graphs["captured"] == 2 * sizes  # with and without scores
    assert graphs["replayed"] == graphs["captured"] + stats["counts"]["forwards"]
