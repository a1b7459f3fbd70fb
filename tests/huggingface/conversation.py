"""A conversation with a converted model, checked against the stock model at every step."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from compiled_dsa.huggingface import PagedCache
from tests.huggingface.tiny_models import Pair, prompt

CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # logits of about unit size after a few hundred fp32 roundings
FP8 = torch.float8_e4m3fn


def pool_bytes(cache: PagedCache) -> list[Tensor]:
    if cache.pool is None:
        return []
    return [t.clone().view(torch.uint8) for layer in cache.pool.layers for t in layer.tensors()]


@dataclass
class Conversation:
    """Feeds tokens to a converted model with a PagedCache, and checks each step against the stock model's logits for
    all tokens so far. ``ids`` and ``mask`` are what the cache should hold."""

    pair: Pair
    cache: PagedCache
    ids: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64))
    mask: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64))
    step: int = 0

    def feed(self, batch_size: int, length: int, mask: Tensor | None = None) -> None:
        self.step += 1
        ids = prompt(batch_size, length, seed=self.step)
        mask = torch.ones_like(ids) if mask is None else mask
        held = self.ids.shape[1]
        self.ids = torch.cat([self.ids, ids], 1) if held else ids
        self.mask = torch.cat([self.mask, mask], 1) if held else mask
        positions = torch.arange(held, held + length).expand(batch_size, -1)
        argument = None if self.mask.all() else self.mask
        with torch.no_grad():
            got = self.pair.ours(ids, attention_mask=argument, position_ids=positions, past_key_values=self.cache)
            want = self.pair.stock(self.ids, attention_mask=argument, use_cache=False).logits[:, held:]
        real = mask.bool()
        torch.testing.assert_close(got.logits[real], want[real], **CLOSE)
        assert not got.logits.isnan().any()
        assert self.cache.get_seq_length() == self.ids.shape[1]

    def rows(self, indices: Tensor) -> None:
        self.ids, self.mask = self.ids[indices], self.mask[indices]

    def crop(self, removed: int) -> None:
        self.cache.crop(-removed)
        kept = self.ids.shape[1] - removed
        self.ids, self.mask = self.ids[:, :kept], self.mask[:, :kept]


def talk(pair: Pair, max_batch_size: int = 3, max_cache_len: int = 100, **options) -> Conversation:
    return Conversation(pair, PagedCache(pair.config, max_batch_size, max_cache_len, **options))
