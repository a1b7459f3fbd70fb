"""Which request holds which pages: free list, reference counts and prefix cache. On the host alone, without tensors.

A page is *free*; or *held* by a request, or by several that share it; or *kept*: held by none, and known by a key under
which a later request with the same prefix adopts it. Kept pages are given up, least recently used first, when free
ones run out.

Sharing rests on one rule. The first ``final`` tokens of a request may be read by others (they were forked, kept or
adopted), so it writes at and after position ``final`` only; ``crop`` lowers it. Then a page that begins at or after
``final`` is the request's own, and the one in which ``final`` stands is the only one that may be shared and still be
written to: ``reserve``, which comes before every step, replaces it by a copy.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral

from compiled_dsa.custom_ops.layout import PAGE


class OutOfPagesError(RuntimeError):
    """The pool has fewer free pages than a request needs; nothing was changed."""


@dataclass(frozen=True)
class PoolStats:
    """Pages of a pool; ``free + held + kept == pages``.

    Attributes:
        free: held and kept by nobody.
        held: by at least one request.
        shared: by more than one request; part of ``held``.
        kept: for later requests, held by none: free on demand.
        peak_held: the most that were ever held at once.
        tokens: of all requests, as reserved; a token in a shared page counts for each of them.
        page_bytes: of one page in all pools of all layers.
    """

    pages: int
    free: int
    held: int
    shared: int
    kept: int
    peak_held: int
    tokens: int
    page_bytes: int

    @property
    def held_bytes(self) -> int:
        return self.held * self.page_bytes


@dataclass
class _Request:
    pages: list[int] = field(default_factory=list)
    tokens: int = 0  # that the pages are reserved for
    final: int = 0  # of them, from the first, those that others may read


def page_keys(tokens: Sequence[int]) -> list[bytes]:
    """A key for every whole page of a prompt, each made of all tokens up to the page's end (chained SHA-256).

    For ``PagePool.keep`` and ``adopt``. What else decides a key's content (a LoRA, an image) the caller has to mix in.
    """
    keys, key = [], b""
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        key = hashlib.sha256(key + array("q", tokens[start : start + PAGE]).tobytes()).digest()
        keys.append(key)
    return keys


class PageLedger:
    """The books of a ``PagePool``, which adds what happens on the device.

    Every method checks before it changes anything: an unknown request or a bad length is a ValueError.
    """

    def __init__(self, num_pages: int, max_requests: int, max_len: int):
        for name, value in (("num_pages", num_pages), ("max_requests", max_requests), ("max_len", max_len)):
            if not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{name}={value}; it must be an integer of at least 1")
        if num_pages * PAGE > 2**31 - 1:
            raise ValueError(f"num_pages={num_pages}; physical slots are int32, so at most {2**31 // PAGE - 1} pages")
        self.num_pages, self.max_len = num_pages, max_len
        self.page_bytes = 0
        self._requests = [_Request() for _ in range(max_requests)]
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages  # requests that hold a page
        self._page_of: dict[Hashable, int] = {}
        self._key_of: dict[int, Hashable] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # kept, held by no request; least recently used first
        self._held = self._shared = self._peak_held = 0

    @property
    def free_pages(self) -> int:
        """Pages that ``reserve`` can hand out: free ones, and kept ones that no request holds."""
        return len(self._free) + len(self._idle)

    def pages_of(self, request: int) -> tuple[int, ...]:
        """The pages that a request holds, in order."""
        return tuple(self._checked(request).pages)

    def statistics(self) -> PoolStats:
        return PoolStats(
            pages=self.num_pages,
            free=len(self._free),
            held=self._held,
            shared=self._shared,
            kept=len(self._idle),
            peak_held=self._peak_held,
            tokens=sum(request.tokens for request in self._requests),
            page_bytes=self.page_bytes,
        )

    # ---- one request ------------------------------------------------------------------------------------------------

    def missing_pages(self, request: int, kv_len: int) -> int:
        """Pages that ``reserve(request, kv_len)`` will take, the copy of a shared one included."""
        state = self._checked(request, kv_len)
        return max(0, -(-kv_len // PAGE) - len(state.pages)) + (self._page_to_copy(state, kv_len) is not None)

    def reserve(self, request: int, kv_len: int) -> None:
        """Gives ``request`` pages for its first ``kv_len`` tokens, before a step that writes any of them.

        Pages that it holds stay, but for one: where the step's first token goes into a page that another request holds
        too, that page is replaced by a copy, in the page table also. So make the step's ``Batch`` afterwards. Kept
        pages are given up as needed.

        A step writes at or after the tokens that were forked, kept or adopted; to write earlier ones again (rejected
        drafts), ``crop`` first.

        Raises:
            ValueError: no such request, or ``kv_len`` outside [0, max_len].
            OutOfPagesError: too few free pages.
        """
        state = self._checked(request, kv_len)
        missing = self.missing_pages(request, kv_len)
        if missing > self.free_pages:
            raise OutOfPagesError(
                f"request {request} needs {missing} more pages for {kv_len} tokens; {self.free_pages} are free"
            )
        changed = missing > 0
        index = self._page_to_copy(state, kv_len)
        if index is not None:
            (copy,) = self._take(1)
            self._copy_pages([state.pages[index]], [copy])
            self._release([state.pages[index]])
            state.pages[index] = copy
            missing -= 1
        elif state.final < kv_len and state.final // PAGE < len(state.pages):
            self._forget(state.pages[state.final // PAGE])  # its own, but kept: what the key stands for is overwritten
        state.pages.extend(self._take(missing))
        state.tokens = max(state.tokens, kv_len)
        if changed:
            self._publish([request])

    def crop(self, request: int, kv_len: int) -> None:
        """Forgets the tokens of ``request`` from ``kv_len`` on and gives the pages back that held only those.

        After a verify step: ``crop(request, accepted tokens)``, then ``reserve`` for the next step.
        """
        state = self._checked(request, kv_len)
        state.tokens, state.final = min(state.tokens, kv_len), min(state.final, kv_len)
        kept = -(-kv_len // PAGE)
        if kept < len(state.pages):
            dropped, state.pages = state.pages[kept:], state.pages[:kept]
            self._release(dropped)
            self._publish([request])

    def free(self, request: int) -> None:
        """Takes all pages of ``request`` back; those that others hold stay theirs, those that are kept stay kept.

        Raises:
            ValueError: no such request, or it holds no pages.
        """
        if not self._checked(request).pages:
            raise ValueError(f"request={request} holds no pages, nothing is to be freed")
        self.crop(request, 0)

    # ---- sharing ----------------------------------------------------------------------------------------------------

    def fork(self, source: int, target: int, kv_len: int) -> None:
        """Request ``target`` shares the pages of the first ``kv_len`` tokens of request ``source``.

        Those tokens must have been computed, or be on their way in work queued before, and are final: see ``reserve``.
        Nothing is copied here; ``reserve`` copies a page that is shared in part, for the first of both to go on.

        Raises:
            ValueError: no such request, ``target`` is ``source`` or holds pages, or ``source`` has fewer tokens.
        """
        state = self._checked(source, kv_len)
        empty = self._checked_empty(target)
        if state is empty:
            raise ValueError(f"target={target}; it must be another request than source")
        if kv_len > state.tokens:
            raise ValueError(f"kv_len={kv_len}; request {source} has {state.tokens} tokens")
        state.final = max(state.final, kv_len)
        self._share(target, state.pages[: -(-kv_len // PAGE)], kv_len)

    def keep(self, request: int, keys: Sequence[Hashable]) -> None:
        """Keeps the first ``len(keys)`` pages of ``request`` for later requests, also after it is freed.

        Their tokens must have been computed, or be on their way in work queued before, and are final: see ``reserve``.
        A page that is kept already and a key that is in use stay as they are.

        Args:
            keys: ``keys[i]`` stands for everything that the request's first ``64*(i+1)`` tokens depend on; see
                ``page_keys``.

        Raises:
            ValueError: no such request, or it has fewer than ``64*len(keys)`` tokens.
        """
        state = self._checked(request)
        if PAGE * len(keys) > state.tokens:
            raise ValueError(f"{len(keys)} keys for whole pages; request {request} has {state.tokens} tokens")
        for key, page in zip(keys, state.pages):
            if key not in self._page_of and page not in self._key_of:
                self._page_of[key], self._key_of[page] = page, key
        state.final = max(state.final, PAGE * len(keys))

    def adopt(self, request: int, keys: Sequence[Hashable]) -> int:
        """Gives ``request`` the kept pages of the longest prefix that is there.

        Leave a prompt's last token out of the keys: its row has to be computed, for the token that follows.

        Args:
            keys: of the request's first pages, as in ``keep``.

        Returns:
            How many tokens the request has now, a multiple of 64: the first ones that it need not compute.

        Raises:
            ValueError: no such request, or it holds pages.
        """
        self._checked_empty(request)
        pages: list[int] = []
        for key in keys[: self.max_len // PAGE]:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        self._share(request, pages, PAGE * len(pages))
        return PAGE * len(pages)

    def evict(self, num_pages: int | None = None) -> int:
        """Gives kept pages up that no request holds, least recently used first.

        Args:
            num_pages: at most so many. None: all of them, and the keys of pages that requests hold are forgotten too,
                as they have to be when weights change.

        Returns:
            How many pages became free.
        """
        if num_pages is not None and num_pages < 0:
            raise ValueError(f"num_pages={num_pages}; it must be at least 0")
        count = len(self._idle) if num_pages is None else min(num_pages, len(self._idle))
        for _ in range(count):
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
            self._free.append(page)
        if num_pages is None:
            self._page_of.clear()
            self._key_of.clear()
        return count

    # ---- places -----------------------------------------------------------------------------------------------------

    def move(self, from_pages: Sequence[int], to_pages: Sequence[int]) -> None:
        """Moves pages, with all that they hold, to free ones; page tables and keys follow.

        Raises:
            ValueError: lengths differ, a page is named twice or outside the pool, a page of ``from_pages`` is free or
                one of ``to_pages`` is not.
        """
        if len(from_pages) != len(to_pages):
            raise ValueError(f"{len(from_pages)} from_pages and {len(to_pages)} to_pages; it must be as many")
        free = set(self._free)
        for name, pages, to_be_free in (("from_pages", from_pages, False), ("to_pages", to_pages, True)):
            if len(set(pages)) < len(pages):
                raise ValueError(f"{name}={list(pages)}; it must not name a page twice")
            for page in pages:
                if not 0 <= page < self.num_pages:
                    raise ValueError(f"{name}: page {page}; the pool has pages 0 to {self.num_pages - 1}")
                if (page in free) != to_be_free:
                    raise ValueError(f"{name}: page {page} is {'not ' if to_be_free else ''}free")
        if not from_pages:
            return
        self._copy_pages(from_pages, to_pages)
        new = dict(zip(from_pages, to_pages))
        for page, to in new.items():
            self._holders[to], self._holders[page] = self._holders[page], 0
            if page in self._key_of:
                self._key_of[to] = self._key_of.pop(page)
                self._page_of[self._key_of[to]] = to
        self._idle = OrderedDict.fromkeys(new.get(page, page) for page in self._idle)
        self._free = sorted(free.difference(to_pages).union(from_pages), reverse=True)
        changed = [i for i, state in enumerate(self._requests) if not new.keys().isdisjoint(state.pages)]
        for i in changed:
            self._requests[i].pages = [new.get(page, page) for page in self._requests[i].pages]
        if changed:
            self._publish(changed)

    def compact(self) -> int:
        """Moves pages so that those in use, kept ones included, have the lowest ids; returns how many moved."""
        used = self.num_pages - len(self._free)
        free = set(self._free)
        from_pages = [page for page in range(used, self.num_pages) if page not in free]
        self.move(from_pages, sorted(page for page in free if page < used))
        return len(from_pages)

    # ---- what a pool does on its device -----------------------------------------------------------------------------

    def _copy_pages(self, from_pages: Sequence[int], to_pages: Sequence[int]) -> None:
        """Copies the content of pages to others; no page is in both lists."""

    def _publish(self, requests: Sequence[int]) -> None:
        """The pages of these requests, one or more, have changed."""

    # ---- steps of the above -----------------------------------------------------------------------------------------

    def _checked(self, request: int, kv_len: int = 0) -> _Request:
        if not isinstance(request, Integral) or not 0 <= request < len(self._requests):
            raise ValueError(f"request={request}; the pool has requests 0 to {len(self._requests) - 1}")
        if not isinstance(kv_len, Integral) or not 0 <= kv_len <= self.max_len:
            raise ValueError(f"kv_len={kv_len}; it must be an integer between 0 and max_len={self.max_len}")
        return self._requests[request]

    def _checked_empty(self, request: int) -> _Request:
        state = self._checked(request)
        if state.pages:
            raise ValueError(f"request={request} holds {len(state.pages)} pages; free it first")
        return state

    def _page_to_copy(self, state: _Request, kv_len: int) -> int | None:
        """Index of the shared page into which a request writes when it grows to ``kv_len``."""
        index = state.final // PAGE
        writes = state.final < kv_len and index < len(state.pages)
        return index if writes and self._holders[state.pages[index]] > 1 else None

    def _own(self, page: int) -> bool:
        """True for a page of one request that is not kept: nobody else reads it."""
        return self._holders[page] == 1 and page not in self._key_of

    def _share(self, request: int, pages: list[int], tokens: int) -> None:
        self._hold(pages)
        self._requests[request] = _Request(pages, tokens, tokens)
        if pages:
            self._publish([request])

    def _take(self, count: int) -> list[int]:
        self.evict(max(0, count - len(self._free)))
        pages = [self._free.pop() for _ in range(count)]
        self._hold(pages)
        return pages

    def _hold(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holders[page] += 1
            self._held += self._holders[page] == 1
            self._shared += self._holders[page] == 2
            self._idle.pop(page, None)
        self._peak_held = max(self._peak_held, self._held)

    def _release(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):  # kept pages are given up from the last one on: the others are of use without it
            self._holders[page] -= 1
            self._shared -= self._holders[page] == 1
            if self._holders[page] == 0:
                self._held -= 1
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def _forget(self, page: int) -> None:
        if page in self._key_of:
            del self._page_of[self._key_of.pop(page)]
