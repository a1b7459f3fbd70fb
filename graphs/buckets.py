"""The sizes to which calls are padded, so that few captured graphs serve all of them."""

import bisect
from collections.abc import Iterable

# Steps of a third to a half: at most that share of a padded call is padding. Beyond the largest size the GPU's work is
# so long that the host keeps ahead of it without a graph.
TOKEN_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)


def is_count(value: object) -> bool:
    """True for an integer of at least 1; a flag is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class Buckets:
    """Sizes in ascending order.

    Args:
        name: of the caller's argument, for messages.

    Raises:
        ValueError: no size, or one that is no integer of at least 1.
    """

    def __init__(self, name: str, sizes: Iterable[int]):
        given = tuple(sizes) if isinstance(sizes, Iterable) else ()
        if not given or not all(is_count(size) for size in given):
            shown = given or repr(sizes)
            raise ValueError(f"{name}={shown}; it must be integers of at least 1, at least one of them")
        self.sizes = tuple(sorted(set(given)))

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def fit(self, size: int) -> int | None:
        """The smallest bucket that holds ``size``, or None when none does."""
        place = bisect.bisect_left(self.sizes, size)
        return self.sizes[place] if place < len(self.sizes) else None
