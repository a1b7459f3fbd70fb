"""One random schedule: requests served over a small PagePool, where whatever a serving loop may do happens by chance.

Before a step: requests arrive, fork a running one's prefix or adopt a kept one, are preempted; kept pages are evicted,
all pages compacted and scattered. A step is one of these, of some of the running requests in a random order:

| step   | rows of each request                                                     | batch                        |
|--------|--------------------------------------------------------------------------|------------------------------|
| mixed  | a chunk of its tokens of any length, 0 to 5 drafts after the last chunk  | ``from_lengths``             |
| decode | one                                                                      | ``decode``                   |
| verify | 2 to 6, the last token and drafts; or the accepted ones once more, as a  | ``decode(tokens=n)``, then   |
|        | draft model computes them                                                | also with ``accepted``       |
| ahead  | 2 to 4 tokens one after another, the host looking on only at the end     | ``decode`` and its ``steps`` |

Drafts are the true next tokens or random ones; those that the model confirms are kept, the others cropped. Each token
is compared with that of the request alone; where it differs the latter is taken, so that the rest can be compared too.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from scheduler import Request
from torch import Tensor

from compiled_dsa import Batch, PagePool
from compiled_dsa.pages import OutOfPagesError, page_keys

MIXED, DECODE, VERIFY, AHEAD = "mixed", "decode", "verify", "ahead"
CHUNKS = (16, 48, 100)  # most rows of a prompt in a step; one of them for a schedule
MAX_DRAFTS, MAX_AHEAD = 5, 4
MAX_PADDING = 5  # rows
MAX_STEPS = 2000  # a schedule takes less than 100

Model = Callable[[Tensor, Batch, PagePool], Tensor]


@dataclass(frozen=True)
class Answer:
    """What a request alone generates, and how close it was to something else, token by token.

    Attributes:
        logit_margins: largest logit less the second.
        score_margins: K-th index score less the next, over the largest magnitude of a score; inf without such scores.
            The least of all layers, for the row whose logits give the token.
    """

    tokens: list[int]
    logit_margins: list[float]
    score_margins: list[float]


@dataclass(frozen=True)
class Difference:
    """A token that is not that of the request alone, and the margins there."""

    request: str
    place: int
    token: int
    expected: int
    logit_margin: float
    score_margin: float


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a request in a step: tokens that it has, after the ``start`` ones that are in the pool, then drafts."""

    request: Request
    start: int
    tokens: list[int]
    drafts: list[int]

    @property
    def ids(self) -> list[int]:
        return self.tokens + self.drafts

    @property
    def kv_len(self) -> int:
        return self.start + len(self.ids)


class RandomLoop:
    """Serves requests in a random order of things.

    Args:
        pool: with all pages free or kept; those of earlier schedules are given up.
        answers: the requests in the order of their arrival, with what they generate alone.
        index_topk: of the model.
        rng: decides everything.

    Attributes:
        counts: of what happened.
        differences: from the answers.
    """

    def __init__(
        self, model: Model, pool: PagePool, answers: dict[Request, Answer], index_topk: int, rng: random.Random
    ):
        self._model, self._pool, self._answers, self._index_topk, self._rng = model, pool, answers, index_topk, rng
        self._order = list(answers)
        self._coming, self._waiting, self._running = list(answers), [], []  # all in the order of arrival
        self._free_rows = list(range(pool.page_table.shape[0]))
        self._chunk = rng.choice(CHUNKS)
        self._draft_quality = rng.choice((0.2, 0.6, 0.8, 1.0))  # how probably a draft is the true token
        self.counts = Counter(requests=len(answers))
        self.differences: list[Difference] = []

    @torch.no_grad()
    def run(self) -> None:
        """Serves all requests to their end.

        Raises:
            RuntimeError: the loop does not come to an end, or pages are lost.
        """
        self._pool.evict()
        self._spoil(0)
        for _ in range(MAX_STEPS):
            if not (self._coming or self._waiting or self._running):
                break
            self._admit()
            self._rearrange()
            self._step()
        else:
            raise RuntimeError(f"{len(self._running)} requests run after {MAX_STEPS} steps")
        if self._pool.free_pages != self._pool.num_pages:
            raise RuntimeError(f"{self._pool.num_pages - self._pool.free_pages} pages are held by no request")

    # ---- before a step ----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._coming and (self._chance(0.3) or not (self._waiting or self._running)):
            self._waiting.append(self._coming.pop(0))
        for request in list(self._waiting):
            if self._free_rows and (self._chance(0.7) or not self._running):
                self._waiting.remove(request)
                request.row = self._free_rows.pop(self._rng.randrange(len(self._free_rows)))
                request.held = self._share_prefix(request)
                self._running.append(request)

    def _share_prefix(self, request: Request) -> int:
        """Tokens of a new request whose keys others have left to it."""
        known = request.tokens[:-1]  # the last one's row is computed, for the token that follows
        common = {source: _common(known, source.tokens[: source.held]) for source in self._running}
        source = max(common, key=common.__getitem__, default=None)
        if source is not None and common[source] and self._chance(0.5):
            kv_len = self._rng.choice((common[source], self._rng.randint(1, common[source])))
            self._pool.fork(source.row, request.row, kv_len)
            self.counts["forks"] += 1
            return kv_len
        held = self._pool.adopt(request.row, page_keys(known))
        self.counts["adopted prefixes"] += held > 0
        return held

    def _rearrange(self) -> None:
        if self._running and self._chance(0.02):
            self._preempt(self._rng.choice(self._running))
        for request in self._running:
            if self._chance(0.05):
                self._keep(request)
        if self._chance(0.05):
            self.counts["evicted pages"] += self._pool.evict(self._rng.choice((1, 2, None)))
        if self._chance(0.2):
            self.counts["moved pages"] += self._pool.compact()
            free = self._pool.statistics().free
            used = self._pool.num_pages - free  # and pages used..num_pages are free
            self._spoil(used)
            count = self._rng.randint(0, min(free, used))
            to_pages = self._rng.sample(range(used, self._pool.num_pages), count)
            self._pool.move(self._rng.sample(range(used), count), to_pages)
            self.counts["moved pages"] += count

    def _spoil(self, first_page: int) -> None:
        """Fills pages with NaN, in every format: nobody may read what is free, and steps write before they read."""
        for layer in self._pool.layers:
            for tensor in layer.tensors():
                tensor.view(torch.uint8)[first_page:].fill_(0xFF)

    def _keep(self, request: Request) -> None:
        keys = page_keys(request.tokens[: request.held])
        self._pool.keep(request.row, keys)
        self.counts["kept prefixes"] += bool(keys)

    def _preempt(self, request: Request) -> None:
        self._end(request, keep=self._chance(0.5))
        request.held = 0
        request.preemptions += 1
        self.counts["preemptions"] += 1
        self._waiting = sorted([*self._waiting, request], key=self._order.index)

    def _end(self, request: Request, *, keep: bool) -> None:
        if keep:
            self._keep(request)
        if self._pool.pages_of(request.row):
            self._pool.free(request.row)
        self._free_rows.append(request.row)
        self._running.remove(request)
        request.row = None

    # ---- a step -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        decoding = [request for request in self._running if request.decoding]
        kind = self._rng.choice((MIXED, DECODE, VERIFY, AHEAD)) if decoding else MIXED
        drafts = {DECODE: 0, VERIFY: self._rng.randint(1, MAX_DRAFTS), AHEAD: self._rng.randint(1, MAX_AHEAD - 1)}
        rows = [
            self._rows(request, self._rng.randint(0, MAX_DRAFTS) if kind == MIXED else drafts[kind])
            for request in self._some(self._running if kind == MIXED else decoding)
        ]
        rows = [each for each in rows if self._reserve(each)]
        rows = [each for each in rows if each.request.row is not None]  # a later one may have taken its pages
        if not rows:
            return
        next_tokens = {MIXED: self._mixed, AHEAD: self._ahead}.get(kind, self._decode)(rows)
        self.counts[f"{kind} steps"] += 1
        counted = [self._book(each, tokens) for each, tokens in zip(rows, next_tokens, strict=True)]
        if kind != AHEAD:  # whose drafts are not guessed
            confirmed = sum(counted) - sum(len(each.tokens) for each in rows)
            self.counts["confirmed drafts"] += confirmed
            self.counts["cropped drafts"] += sum(len(each.drafts) for each in rows) - confirmed
        if kind == VERIFY and self._chance(0.3):
            self._extend(rows, counted)
        for request in (each.request for each in rows):
            self._pool.crop(request.row, request.held)
            if request.finished:
                self._end(request, keep=self._chance(0.9))

    def _some(self, requests: list[Request]) -> list[Request]:
        if self._chance(0.5):
            return self._rng.sample(requests, len(requests))
        return self._rng.sample(requests, self._rng.randint(min(1, len(requests)), len(requests)))

    def _rows(self, request: Request, drafts: int) -> Rows:
        """The next rows of a request: a chunk of any length, and that many drafts if it is the last one."""
        count = min(request.pending, self._rng.choice((self._chunk, self._rng.randint(1, self._chunk))))
        tokens = request.tokens[request.held : request.held + count]
        return Rows(request, request.held, tokens, self._drafts(request, drafts if count == request.pending else 0))

    def _drafts(self, request: Request, count: int) -> list[int]:
        alone, done = self._answers[request].tokens, len(request.generated)
        true = alone[done : done + count]
        true += [0] * (count - len(true))  # beyond the last token any will do
        return [token if self._chance(self._draft_quality) else self._rng.choice(request.prompt) for token in true]

    def _reserve(self, rows: Rows) -> bool:
        """Pages for the rows, for which the youngest requests yield; False when that was the request itself."""
        while rows.request.row is not None:
            kept = self._pool.statistics().kept
            try:
                self._pool.reserve(rows.request.row, rows.kv_len)
            except OutOfPagesError:
                self._preempt(max(self._running, key=self._order.index))
            else:
                self.counts["evicted pages"] += kept - self._pool.statistics().kept
                return True
        return False

    def _book(self, rows: Rows, next_tokens: Sequence[int]) -> int:
        """Takes the tokens that follow the rows as far as the drafts were right; returns how many rows count.

        ``next_tokens``: after the last of the request's own tokens, and after each draft.
        """
        request = rows.request
        request.held += len(rows.tokens)
        if request.pending:  # its prompt goes on
            return len(rows.tokens)
        for i, token in enumerate(next_tokens):
            place = len(request.generated)
            request.tokens.append(self._compare(request, place, token))
            self.counts["tokens"] += 1
            if request.finished or i == len(rows.drafts) or rows.drafts[i] != request.tokens[-1]:
                break
            request.held += 1
        return request.held - rows.start

    def _compare(self, request: Request, place: int, token: int) -> int:
        """The new token at that place of the request alone."""
        alone = self._answers[request]
        expected = alone.tokens[place]
        if token != expected:
            margins = alone.logit_margins[place], alone.score_margins[place]
            self.differences.append(Difference(request.name, place, token, expected, *margins))
        return expected

    # ---- what is computed -------------------------------------------------------------------------------------------
    # torch compiles code of its own for sizes of 1: a step has two requests and two rows at least, empty or not.

    def _mixed(self, rows: list[Rows]) -> list[list[int]]:
        empty = max(2 - len(rows), self._rng.choice((0, 0, 1)))  # requests without rows, at any place
        places = sorted(self._rng.sample(range(len(rows) + empty), len(rows)))
        q_len, kv_len, table = ([0] * (len(rows) + empty) for _ in range(3))
        for place, each in zip(places, rows):
            q_len[place], kv_len[place], table[place] = len(each.ids), each.kv_len, each.request.row
        ids = [token for each in rows for token in each.ids]
        ids += [0] * max(2 - len(ids), self._rng.randint(0, MAX_PADDING))
        q_len, kv_len, table = self._tensor([q_len, kv_len, table])
        batch = Batch.from_lengths(
            q_len, kv_len, self._pool.page_table[table], len(ids), skip_scores=self._skip_scores(rows)
        )
        best = iter(self._best(self._tensor(ids), batch).tolist())
        of_rows = [[next(best) for _ in each.ids] for each in rows]
        return [tokens[len(each.tokens) - 1 :] for each, tokens in zip(rows, of_rows)]

    def _decode(self, rows: list[Rows], accepted: list[int] | None = None) -> list[list[int]]:
        """As many rows of each request. ``accepted``: how many of them count; the last of those gives the token."""
        tokens = len(rows[0].ids)
        kv_len, table, empty = self._places(rows)
        if accepted is not None:
            accepted = self._tensor(accepted + [0] * empty)
        batch = Batch.decode(kv_len, table, tokens, accepted=accepted, skip_scores=self._skip_scores(rows))
        ids = self._tensor([each.ids for each in rows] + [[0] * tokens] * empty)
        best = self._best(ids.flatten(), batch)
        if accepted is not None:
            return best[batch.last_rows(accepted), None].tolist()[: len(rows)]
        return best.view(-1, tokens).tolist()[: len(rows)]

    def _extend(self, rows: list[Rows], counted: list[int]) -> None:
        """Rows of a verify step that count, once more: the keys are written as they are, the tokens are the same."""
        for each, (token,) in zip(rows, self._decode(rows, counted)):
            self._compare(each.request, len(each.request.generated) - 1, token)
        self.counts["draft-extend steps"] += 1

    def _ahead(self, rows: list[Rows]) -> list[list[int]]:
        """Several steps of one token; the drafts of the rows become what the steps gave."""
        more = len(rows[0].drafts)
        kv_len, table, empty = self._places(rows)
        skip_scores = self._skip_scores(rows)
        first = Batch.decode((kv_len - more).clamp(min=0), table, skip_scores=skip_scores)
        best = [self._best(self._tensor([each.ids[0] for each in rows] + [0] * empty), first)]
        for batch in first.steps(more, skip_scores=skip_scores):
            best.append(self._best(best[-1], batch))
        next_tokens = torch.stack(best, 1).tolist()[: len(rows)]
        for each, tokens in zip(rows, next_tokens):
            each.drafts[:] = tokens[:-1]
        return next_tokens

    def _places(self, rows: list[Rows]) -> tuple[Tensor, Tensor, int]:
        """kv_len and page table of the rows' requests and of empty ones after them, and how many these are."""
        empty = max(2 - len(rows), self._rng.choice((0, 0, 1)))
        kv_len = self._tensor([each.kv_len for each in rows] + [0] * empty)
        table = self._tensor([each.request.row for each in rows] + [0] * empty)
        return kv_len, self._pool.page_table[table], empty

    def _best(self, ids: Tensor, batch: Batch) -> Tensor:
        """int64 [T]: the most probable token after each row."""
        self.counts["forwards"] += 1
        self.counts["rows"] += len(ids)
        self.counts["forwards without scores"] += batch.skip_scores
        return self._model(ids, batch, self._pool).argmax(-1)

    def _skip_scores(self, rows: list[Rows]) -> bool:
        """A loose bound: not always, when it may be."""
        return max(each.kv_len for each in rows) <= self._index_topk and self._chance(0.7)

    def _tensor(self, values) -> Tensor:
        return torch.tensor(values, device=self._pool.page_table.device)

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
