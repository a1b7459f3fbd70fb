"""What a serving loop runs next: chunks of prompts and single tokens of many requests, over a pool of pages.

No tensor is touched here, and the policy is short: the older request goes first.

- Requests are admitted in the order in which they arrive, when the pool has pages for all tokens that they have so far
  and one to spare, into which those that run can grow.
- Every running request that is past its prompt gets one row a step; the rows that the budget leaves go to prompts, the
  oldest first, at most a chunk each.
- When a request cannot grow, the youngest one gives its pages back and waits at the head of the queue. Its tokens stay;
  their keys are computed again, like those of a prompt.

The oldest request is never the one to yield and the pool is large enough for each request alone, so it finishes, and
after it the next one: none waits forever.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from compiled_dsa import PagePool
from compiled_dsa.custom_ops.layout import PAGE


@dataclass(eq=False)
class Request:
    """A prompt and how many tokens to generate after it.

    Attributes:
        tokens: the prompt, then the tokens generated so far.
        held: tokens whose keys are in the pool.
        row: of the pool's page table, while it runs.
        preemptions: how often it had to give its pages back.
    """

    name: str
    prompt: Sequence[int]
    new_tokens: int
    tokens: list[int] = field(init=False)
    held: int = field(init=False, default=0)
    row: int | None = field(init=False, default=None)
    preemptions: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def finished(self) -> bool:
        return len(self.tokens) == len(self.prompt) + self.new_tokens

    @property
    def pending(self) -> int:
        """Tokens whose keys are to be computed before the next one is known."""
        return len(self.tokens) - self.held

    @property
    def decoding(self) -> bool:
        return self.held > 0 and self.pending == 1

    @property
    def most_keys(self) -> int:
        """Keys at its end: the last token is not fed back."""
        return len(self.prompt) + self.new_tokens - 1


@dataclass(frozen=True)
class Chunk:
    """The next ``rows`` tokens of a request, computed in one step; ``ids`` and ``kv_len`` hold until it is booked."""

    request: Request
    rows: int

    @property
    def ids(self) -> list[int]:
        return self.request.tokens[self.request.held : self.kv_len]

    @property
    def kv_len(self) -> int:
        """Keys of the request after the step."""
        return self.request.held + self.rows


class Scheduler:
    """Decides the rows of each step, and keeps the books of pages.

    Args:
        pool: with all of its pages free.
        max_batch: most requests that run at once; rows of the pool's page table.
        chunk: most rows of one request in a step.
        token_budget: most rows of a step.

    Attributes:
        waiting, running: requests in the order of their arrival; those that run are older than those that wait.
    """

    def __init__(self, pool: PagePool, *, max_batch: int, chunk: int, token_budget: int):
        for name, value in (("max_batch", max_batch), ("chunk", chunk)):
            if value < 1:
                raise ValueError(f"{name}={value}; it must be at least 1")
        if token_budget < max_batch:
            raise ValueError(f"token_budget={token_budget}; it must be at least max_batch={max_batch}: a row for each")
        self._pool, self._pages = pool, pool.free_pages
        self._chunk, self._token_budget = chunk, token_budget
        self._free_rows = list(range(max_batch))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queues a new request.

        Raises:
            ValueError: it has no prompt, wants no tokens, or would not fit in the pool if it were alone there.
        """
        if not request.prompt or request.new_tokens < 1:
            raise ValueError(
                f"request {request.name}: {len(request.prompt)} prompt and {request.new_tokens} new tokens; "
                "both must be at least 1"
            )
        most = min(self._pool.max_len, self._pages * PAGE)
        if request.most_keys > most:
            raise ValueError(f"request {request.name} needs {request.most_keys} keys; the pool holds at most {most}")
        self.waiting.append(request)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, at most one a request, whose pages are reserved; empty only when not busy."""
        decoding = self._grow()
        self._admit()
        chunks = [Chunk(request, 1) for request in decoding]
        budget = self._token_budget - len(chunks)
        for request in self.running:
            rows = min(request.pending, self._chunk, budget)
            if request not in decoding and rows > 0:
                chunks.append(Chunk(request, rows))
                budget -= rows
        return chunks

    def advance(self, chunks: Sequence[Chunk], next_tokens: Iterable[int]) -> list[Request]:
        """Books a step that was computed.

        Args:
            chunks: of the last ``schedule()``.
            next_tokens: what follows the last row of each chunk; not looked at where a prompt goes on.

        Returns:
            The requests that it finished, whose pages are free again.
        """
        done = []
        for chunk, token in zip(chunks, next_tokens, strict=True):
            request = chunk.request
            request.held = chunk.kv_len
            if request.held == len(request.tokens):
                request.tokens.append(token)
            if request.finished:
                self._release(request)
                done.append(request)
        return done

    def _grow(self) -> list[Request]:
        """The decoding requests, with a page for their keys; the youngest request makes room where one is missing."""
        ready: list[Request] = []
        for request in [r for r in self.running if r.decoding]:
            while request.row is not None and self._missing_pages(request) > self._pool.free_pages:
                self._preempt(self.running[-1])
            if request.row is not None:  # else it was the youngest
                self._pool.reserve(request.row, len(request.tokens))
                ready.append(request)
        return ready

    def _admit(self) -> None:
        while self.waiting and self._free_rows:
            request = self.waiting[0]
            if self.running and _pages(len(request.tokens)) >= self._pool.free_pages:
                return  # and no younger one overtakes it
            self.waiting.popleft()
            request.row = self._free_rows.pop()
            self.running.append(request)
            self._pool.reserve(request.row, len(request.tokens))

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.held = 0
        request.preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self._pool.free(request.row)
        self._free_rows.append(request.row)
        request.row = None
        self.running.remove(request)

    def _missing_pages(self, request: Request) -> int:
        return _pages(len(request.tokens)) - len(self._pool.pages_of(request.row))


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE)
