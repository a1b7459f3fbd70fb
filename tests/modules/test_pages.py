"""Shared, kept and moved pages: after any calls each request reads its own tokens, and no page is lost."""

from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from compiled_dsa import DSAConfig, OutOfPagesError, PagePool, page_keys
from compiled_dsa.custom_ops.layout import FP8, PAGE, logical_slots
from compiled_dsa.pages import PageLedger
from tests.huggingface.tiny_models import tiny_config

LAYERS = [DSAConfig.from_hf(tiny_config("glm_moe_dsa"), i) for i in range(2)]  # the second one has no index keys
PAGES, REQUESTS, MAX_LEN = 10, 4, 250
REQUEST, LENGTH, SHARE = st.integers(0, REQUESTS - 1), st.integers(0, MAX_LEN), st.floats(0, 1)


def make_pool() -> PagePool:
    sizes = {"num_pages": PAGES, "max_requests": REQUESTS, "max_len": MAX_LEN}
    return PagePool(LAYERS, **sizes, latent_dtype=torch.float32, index_dtype=FP8, device="cpu")


def expected(tensor: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """What ``tensor`` of ``LayerPools.token_tensors()`` holds of tokens: [n] or [n, elements]."""
    ids = torch.tensor(tokens, dtype=torch.int64)
    ids = (ids % 251 if tensor.dtype == torch.uint8 else ids).to(tensor.dtype)
    return ids if tensor.dim() == 2 else ids.unsqueeze(1).expand(-1, tensor.shape[2])


def places(pool: PagePool, request: int, positions: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages and offsets by the page table on the device, as a step finds them."""
    slots = logical_slots(pool.page_table, torch.tensor([request]), torch.tensor(positions), PAGES)
    assert bool((slots >= 0).all())
    return slots // PAGE, slots % PAGE


def write(pool: PagePool, request: int, start: int, tokens: list[int]) -> None:
    if tokens:
        place = places(pool, request, range(start, start + len(tokens)))
        for layer in pool.layers:
            for tensor in layer.token_tensors():
                tensor[place] = expected(tensor, tokens)


def holds(pool: PagePool, place: tuple[torch.Tensor, torch.Tensor], tokens: list[int]) -> bool:
    tensors = [tensor for layer in pool.layers for tensor in layer.token_tensors()]
    return all(torch.equal(tensor[place], expected(tensor, tokens)) for tensor in tensors)


class Sharing(RuleBasedStateMachine):
    """Against a model that is a list of tokens a request; its tokens are numbers that are never used twice."""

    def __init__(self):
        super().__init__()
        self.pool = make_pool()
        self.tokens: list[list[int]] = [[] for _ in range(REQUESTS)]
        self.chains: list[list[tuple[int, ...]]] = [[]]  # keys that were kept together; a key is the prefix itself
        self.next_token = 1

    @initialize(lengths=st.lists(LENGTH, min_size=2, max_size=2))
    def start(self, lengths):
        for request, length in enumerate(lengths):
            self.append(request, length)

    def append(self, request: int, count: int) -> list[int] | None:
        """Reserves and writes new tokens; None: too few pages."""
        old = len(self.tokens[request])
        if not self.reserved(request, old + count):
            return None
        drafts = list(range(self.next_token, self.next_token + count))
        self.next_token += count
        write(self.pool, request, old, drafts)
        self.tokens[request] += drafts
        return drafts

    def reserved(self, request: int, kv_len: int) -> bool:
        missing, free = self.pool.missing_pages(request, kv_len), self.pool.free_pages
        before = self.books()
        try:
            self.pool.reserve(request, kv_len)
        except OutOfPagesError as error:
            assert f"request {request} needs {missing} more pages for {kv_len} tokens; {free} are free" == str(error)
            assert missing > free and self.books() == before
            return False
        assert self.pool.free_pages == free - missing
        assert self.pool.missing_pages(request, kv_len) == 0
        return True

    def books(self) -> tuple:
        pages = [self.pool.pages_of(r) for r in range(REQUESTS)]
        return pages, self.pool.statistics(), self.pool.page_table.tolist(), dict(self.pool._page_of)

    @rule(request=REQUEST, new=st.integers(1, 130), accepted=SHARE, tree=st.randoms(), crops=st.booleans())
    def step(self, request, new, accepted, tree, crops):
        """Of the new tokens some are accepted, in a row or, as in a tree of drafts, anywhere; the rest is rejected."""
        old = len(self.tokens[request])
        new = min(new, MAX_LEN - old)
        drafts = self.append(request, new)
        if drafts is None:
            return
        chosen = range(round(accepted * new))
        if tree.random() < 0.3:
            chosen = sorted(tree.sample(range(new), len(chosen)))
            self.pool.move_tokens(request, [old + i for i in chosen], range(old, old + len(chosen)))
        self.tokens[request][old:] = [drafts[i] for i in chosen]
        if crops:
            self.pool.crop(request, old + len(chosen))

    @rule(request=REQUEST, kv_len=LENGTH)
    def reserve_ahead(self, request, kv_len):
        self.reserved(request, kv_len)

    @rule(request=REQUEST, kv_len=LENGTH)
    def crop(self, request, kv_len):
        self.pool.crop(request, kv_len)
        del self.tokens[request][kv_len:]

    @rule(request=REQUEST, kept=SHARE)
    def finish(self, request, kept):
        """As loops do it: pages of a finished request stay for those with the same prefix. Then it is freed twice."""
        if self.pool.pages_of(request):
            self.keep(request, kept)
            self.pool.free(request)
            self.tokens[request] = []
        before = self.books()
        with pytest.raises(ValueError, match=f"request={request} holds no pages"):
            self.pool.free(request)
        assert self.books() == before

    @rule(source=REQUEST, to=REQUEST, share=SHARE)
    def fork(self, source, to, share):
        kv_len = round(share * len(self.tokens[source]))
        if not self.pool.pages_of(to) and source != to:
            free = self.pool.free_pages
            self.pool.fork(source, to, kv_len)
            self.tokens[to] = self.tokens[source][:kv_len]
            assert self.pool.free_pages == free
            return
        before = self.books()
        with pytest.raises(ValueError, match=f"request={to} holds|target={to}; it must be another"):
            self.pool.fork(source, to, kv_len)
        assert self.books() == before

    @rule(request=REQUEST, share=SHARE)
    def keep(self, request, share):
        tokens = self.tokens[request]
        ends = range(PAGE, round(share * len(tokens)) + 1, PAGE)
        self.chains.append([tuple(tokens[:end]) for end in ends])
        self.pool.keep(request, self.chains[-1])

    @rule(request=REQUEST, chain=st.randoms())
    def adopt(self, request, chain):
        keys = chain.choice(self.chains)
        if self.pool.pages_of(request):
            return
        found = self.pool.adopt(request, keys)
        assert found % PAGE == 0 and all(key in self.pool._page_of for key in keys[: found // PAGE])
        assert found == PAGE * len(keys) or keys[found // PAGE] not in self.pool._page_of
        self.tokens[request] = list(keys[found // PAGE - 1]) if found else []

    @rule(count=st.one_of(st.none(), st.integers(0, 4)))
    def evict(self, count):
        before = self.pool.statistics()
        assert self.pool.evict(count) == before.kept - self.pool.statistics().kept
        assert self.pool.statistics().kept == (0 if count is None else max(0, before.kept - count))
        assert count is not None or not self.pool._page_of

    @rule(chosen=st.randoms(), count=st.integers(0, 4))
    def move(self, chosen, count):
        free = sorted(self.pool._free)
        used = [page for page in range(PAGES) if page not in free]
        count = min(count, len(free), len(used))
        self.pool.move(chosen.sample(used, count), chosen.sample(free, count))

    @rule()
    def compact(self):
        self.pool.compact()
        stats = self.pool.statistics()
        assert sorted(self.pool._free) == list(range(stats.held + stats.kept, PAGES))

    @invariant()
    def every_request_reads_its_tokens(self):
        for request, tokens in enumerate(self.tokens):
            if tokens:
                assert holds(self.pool, places(self.pool, request, range(len(tokens))), tokens)

    @invariant()
    def every_key_leads_to_its_tokens(self):
        for key, page in self.pool._page_of.items():
            assert holds(self.pool, (torch.full((PAGE,), page), torch.arange(PAGE)), list(key[-PAGE:]))

    @invariant()
    def no_page_is_lost(self):
        pool, stats = self.pool, self.pool.statistics()
        held = [pool.pages_of(r) for r in range(REQUESTS)]
        holders = Counter(page for pages in held for page in pages)
        assert pool._holders == [holders[page] for page in range(PAGES)]
        idle = set(pool._key_of) - set(holders)
        assert set(pool._idle) == idle and pool._page_of == {key: page for page, key in pool._key_of.items()}
        assert sorted([*pool._free, *idle, *holders]) == list(range(PAGES))
        assert (stats.free, stats.held, stats.kept) == (len(pool._free), len(holders), len(idle))
        assert stats.shared == sum(count > 1 for count in holders.values())
        assert stats.held <= stats.peak_held and pool.free_pages == stats.free + stats.kept
        for pages, row in zip(held, pool.page_table.tolist()):
            assert row == list(pages) + [-1] * (len(row) - len(pages))


Sharing.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestSharing = Sharing.TestCase


def ledger(pages: int = 6, requests: int = 3) -> PageLedger:
    return PageLedger(pages, requests, 6 * PAGE)


def test_a_fork_copies_one_page_when_one_of_both_goes_on():
    pool = make_pool()
    pool.reserve(0, 100)
    write(pool, 0, 0, list(range(1, 101)))
    pool.fork(0, 1, 100)
    assert pool.pages_of(1) == pool.pages_of(0) == (0, 1) and pool.statistics().shared == 2
    assert [pool.missing_pages(r, 101) for r in (0, 1)] == [1, 1]
    pool.reserve(1, 101)
    write(pool, 1, 100, [555])
    assert pool.pages_of(0) == (0, 1) and pool.pages_of(1) == (0, 2)
    assert pool.missing_pages(0, 101) == 0  # the page is its own again
    pool.reserve(0, 101)
    write(pool, 0, 100, [666])
    for request, last in ((0, 666), (1, 555)):
        assert holds(pool, places(pool, request, range(101)), [*range(1, 101), last])


def test_rejected_drafts_below_a_shared_page_are_written_to_a_copy():
    books = ledger()
    books.reserve(0, 128)
    books.fork(0, 1, 128)
    books.reserve(1, 129)
    assert books.pages_of(1) == (0, 1, 2)  # full pages are never copied
    books.crop(1, 126)
    books.reserve(1, 126)
    assert books.pages_of(1) == (0, 1)  # nothing is written yet
    books.reserve(1, 127)
    assert books.pages_of(1) == (0, 2) and books.pages_of(0) == (0, 1)


def test_drafts_that_were_not_cropped_are_no_excuse_to_write_into_a_shared_page():
    books = ledger()
    books.reserve(0, 130)  # 126 tokens and 4 drafts, all rejected
    books.fork(0, 1, 126)
    books.reserve(0, 131)
    assert books.pages_of(0) == (0, 3, 2) and books.pages_of(1) == (0, 1)


def test_too_few_pages_for_a_copy():
    books = ledger(pages=2)
    books.reserve(0, 100)
    books.fork(0, 1, 100)
    with pytest.raises(OutOfPagesError, match="request 1 needs 1 more pages for 101 tokens; 0 are free"):
        books.reserve(1, 101)
    assert books.pages_of(1) == (0, 1)
    books.free(0)
    books.reserve(1, 101)
    assert books.pages_of(1) == (0, 1)


def test_kept_pages_are_given_up_least_recently_used_and_last_first():
    books = ledger()
    for name in "ab":
        books.reserve(0, 2 * PAGE)
        books.keep(0, [f"{name}1", f"{name}2"])
        books.free(0)
    assert books.free_pages == 6 and books.statistics().kept == 4
    assert books.adopt(0, ["a1", "a2", "a3"]) == 2 * PAGE
    books.free(0)
    books.reserve(0, 3 * PAGE)
    assert set(books._page_of) == {"a1", "a2", "b1"}
    assert books.evict(2) == 2 and set(books._page_of) == {"a1"}
    assert books.adopt(1, ["a1", "a2"]) == PAGE and books.adopt(2, ["a2"]) == 0
    assert books.evict() == 0 and not books._page_of  # the page is in use, its key is forgotten
    books.free(1)
    assert books.statistics().free == 3


def test_kept_pages_stay_known_when_their_request_goes_on_and_when_they_move():
    pool = make_pool()
    pool.reserve(0, 130)
    write(pool, 0, 0, list(range(1, 131)))
    pool.keep(0, ["a", "b"])
    pool.reserve(0, 200)
    assert pool.pages_of(0) == (0, 1, 2, 3)  # nothing was copied
    pool.move([1], [7])
    pool.free(0)
    pool.move([0, 7], [9, 8])
    assert pool.evict(0) == 0 and pool.adopt(1, ["a", "b"]) == 128 and pool.pages_of(1) == (9, 8)
    assert holds(pool, places(pool, 1, range(128)), list(range(1, 129)))
    pool.free(1)
    assert pool.compact() == 2 and pool.evict(1) == 1
    assert pool.adopt(1, ["a", "b"]) == 64 and holds(pool, places(pool, 1, range(64)), list(range(1, 65)))


def test_a_request_may_write_again_into_pages_that_it_kept():
    books = ledger(pages=1)
    books.reserve(0, PAGE)
    books.keep(0, ["a"])
    books.crop(0, 10)
    books.reserve(0, 11)  # the pool has no other page, and what the key stood for is overwritten
    assert books.pages_of(0) == (0,) and books.adopt(1, ["a"]) == 0


def test_statistics():
    pool = make_pool()
    pool.reserve(0, 200)
    pool.fork(0, 1, 130)
    pool.keep(0, page_keys(range(200)))
    stats = pool.statistics()
    assert (stats.pages, stats.free, stats.held, stats.shared, stats.kept) == (10, 6, 4, 3, 0)
    assert (stats.tokens, stats.peak_held) == (330, 4)
    assert stats.page_bytes == sum(t.nbytes for layer in pool.layers for t in layer.tensors()) // PAGES
    assert stats.held_bytes == 4 * stats.page_bytes
    pool.free(0)
    pool.free(1)
    stats = pool.statistics()
    assert (stats.free, stats.held, stats.shared, stats.kept, stats.tokens, stats.peak_held) == (7, 0, 0, 3, 0, 4)


def test_page_keys_depend_on_all_tokens_before_them():
    tokens = list(range(200))
    keys = page_keys(tokens)
    assert len(keys) == 3 and page_keys(tokens[:-9]) == keys[:2] and page_keys(tokens[:63]) == []
    assert [a == b for a, b in zip(keys, page_keys([*tokens[:70], 7, *tokens[71:]]))] == [True, False, False]
    assert [a == b for a, b in zip(keys, page_keys([7, *tokens[1:]]))] == [False, False, False]
    assert page_keys(tokens[:PAGE] * 2)[0] != page_keys(tokens[:PAGE] * 2)[1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.fork(0, 1, 100), "request=1 holds 1 pages; free it first"),
        (lambda p: p.fork(2, 2, 0), "target=2; it must be another request than source"),
        (lambda p: p.fork(0, 2, 101), "kv_len=101; request 0 has 100 tokens"),
        (lambda p: p.fork(0, 2, -1), "kv_len=-1; it must be an integer between 0 and max_len=250"),
        (lambda p: p.fork(4, 2, 1), "request=4; the pool has requests 0 to 3"),
        (lambda p: p.fork(0, -1, 1), "request=-1; the pool has"),
        (lambda p: p.keep(0, ["a", "b"]), "2 keys for whole pages; request 0 has 100 tokens"),
        (lambda p: p.adopt(0, []), "request=0 holds 2 pages; free it first"),
        (lambda p: p.missing_pages(0, 251), "kv_len=251; it must be an integer between 0 and max_len=250"),
        (lambda p: p.reserve(0, 3.5), "kv_len=3.5; it must be an integer between 0 and max_len=250"),
        (lambda p: p.crop(0, 99.0), "kv_len=99.0; it must be an integer"),
        (lambda p: p.free(0.0), "request=0.0; the pool has requests 0 to 3"),
        (lambda p: p.evict(-1), "num_pages=-1; it must be at least 0"),
        (lambda p: p.free(2), "request=2 holds no pages"),
        (lambda p: p.move([0, 1], [5]), "2 from_pages and 1 to_pages"),
        (lambda p: p.move([0, 0], [5, 6]), r"from_pages=\[0, 0\]; it must not name a page twice"),
        (lambda p: p.move([0, 1], [5, 5]), r"to_pages=\[5, 5\]; it must not name a page twice"),
        (lambda p: p.move([0, 10], [5, 6]), "from_pages: page 10; the pool has pages 0 to 9"),
        (lambda p: p.move([5], [6]), "from_pages: page 5 is free"),
        (lambda p: p.move([0], [1]), "to_pages: page 1 is not free"),
        (lambda p: p.move_tokens(1, [0, 1], [2]), "2 requests, 2 from_positions and 1 to_positions"),
        (lambda p: p.move_tokens([1], [0, 1], [2, 3]), "1 requests, 2 from_positions and 2 to_positions"),
        (lambda p: p.move_tokens(1, [60], [0]), "from_positions: token 60; request 1 has 60 tokens"),
        (lambda p: p.move_tokens(1, [0], [-1]), "to_positions: token -1; request 1 has 60 tokens"),
        (lambda p: p.move_tokens(1, [5, 6], [0, 0]), r"to_positions=\[0, 0\]; it must not name a token twice"),
        (lambda p: p.move_tokens([1, 0], [5, 6], [0, 1]), "to_positions: token 1 of request 0 is in a page shared or"),
        (lambda p: p.reorder(torch.tensor([0, 0]), 1), "num_pages=1; a page of request 0 is shared or kept"),
    ],
)
def test_refused_calls_change_nothing(call, message):
    pool = make_pool()
    pool.reserve(0, 100)
    pool.reserve(1, 60)
    pool.fork(0, 3, 64)
    write(pool, 0, 0, list(range(100)))
    tensors = [tensor for layer in pool.layers for tensor in layer.tensors()]
    before = pool.statistics(), [pool.pages_of(r) for r in range(4)], [t.clone() for t in (*tensors, pool.page_table)]
    with pytest.raises(ValueError, match=message):
        call(pool)
    assert (pool.statistics(), [pool.pages_of(r) for r in range(4)]) == before[:2]
    assert all(map(torch.equal, (*tensors, pool.page_table), before[2]))
