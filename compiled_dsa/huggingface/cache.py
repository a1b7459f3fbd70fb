"""PagedCache: page pools as a transformers cache.

Columns and positions: transformers counts columns (padding included), the pools hold real tokens only. A row of the
batch is a request; its kv length counts its real tokens, and a padding column gets no slot.

What the host must know of a step (does it fit, may scores be skipped) it learns in ``begin``, which runs eagerly before
a forward; the forward itself reads tensors and one flag, so that its trace depends on no length. A forward that was
compiled together with everything around it runs without ``begin``; it then takes the general variant, and the host's
count of columns is read back from the device when it is next asked for.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache

from compiled_dsa.batch import Batch
from compiled_dsa.cache import LayerPools, PagePool, check_cache_dtype, supports_fp8
from compiled_dsa.config import DSAConfig
from compiled_dsa.custom_ops.layout import FP8, PAGE
from compiled_dsa.huggingface.masks import fit_columns
from compiled_dsa.huggingface.paged_layer import PagedLayer


def _cached_sizes(c: DSAConfig) -> tuple:
    latents = c.kv_lora_rank, c.qk_rope_head_dim, c.kv_source, c.window
    return *latents, c.index_head_dim, c.index_topk, c.index_format, c.index_shared


class PagedCache(Cache):
    """A transformers cache of paged latents and index keys, for models after ``replace_attention``.

    All pages are allocated up front: row b of the batch owns ceil(max_cache_len/64) pages for its life, so graphs may
    capture the addresses. Layers with a sliding window keep all tokens too.

    Args:
        config: the model's config.
        max_batch_size: rows at most, beams included.
        max_cache_len: columns (tokens, padding included) a row at most.
        latent_dtype: dtype of the latents; None = ``dtype``, ``torch.float8_e4m3fn`` = the fp8 layout.
        index_dtype: dtype of the index keys; None = fp8 on a GPU that has it, else ``dtype``.
        device: where the pools live; None = where the first forward's hidden states are.
        dtype: the model's dtype; None = that of the first forward's hidden states.

    Raises:
        ValueError: an unsupported model, or a size below 1. Later calls raise it before anything is written: for a
            batch or length that does not fit, another batch size while rows are held, a mask that changes earlier
            columns. Only a forward that is compiled together with its pre-hooks (``torch.compile(model)(...)``,
            ``model.compile()``) runs unchecked: what does not fit is not stored, and the next call that asks for the
            length raises. ``compile_model`` checks every forward of the model that ``replace_attention`` was given.
    """

    # Read-only properties of Cache before transformers 5.23; a plain attribute of the class hides them.
    max_batch_size: int = 0
    max_cache_len: int = 0

    def __init__(
        self,
        config,
        max_batch_size: int,
        max_cache_len: int,
        *,
        latent_dtype: torch.dtype | None = None,
        index_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        config = config.get_text_config(decoder=True)
        self.layer_configs = [DSAConfig.from_hf(config, i) for i in range(config.num_hidden_layers)]
        if self.layer_configs[0].window is not None:
            raise ValueError("layer_types[0]='sliding_attention'; the first layer must be indexed, its mask is read")
        for name, value in (("max_batch_size", max_batch_size), ("max_cache_len", max_cache_len)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}; it must be an integer of at least 1")
        for name, cached in (("latent_dtype", latent_dtype), ("index_dtype", index_dtype)):
            if cached is not None:
                check_cache_dtype(name, cached)
        if dtype is not None and not (dtype.is_floating_point and dtype.itemsize > 1):
            raise ValueError(f"dtype={dtype}; it must be a model dtype")
        super().__init__(layers=[PagedLayer(c.window is not None) for c in self.layer_configs])
        self.max_batch_size = max_batch_size
        self.max_cache_len = max_cache_len
        self.index_topk = self.layer_configs[0].index_topk
        self._dtypes = (latent_dtype, index_dtype)
        self.pool: PagePool | None = None
        self._columns: int | None = 0  # None: a fully compiled forward advanced the device's count only
        self._rows = 0  # batch size in use, 0 while empty
        self._padded = False  # some column so far was padding
        self._begun: tuple[bool, bool] | None = None  # (skip_scores, padded to a bucket) of the announced forward
        self._before: tuple[int, int, bool] = (0, 0, False)  # columns, rows, padded, before that announcement
        self._batch: Batch | None = None  # of the forward under way
        self._step_columns: Tensor | None = None  # int64 [S], its columns, when some column so far is padding
        self.new_tokens = 0  # tokens a row of the forward that begin() announced
        self._device, self._dtype = device, dtype
        self.serves: tuple | None = None  # the model and dtype that check_model last accepted
        if device is not None and dtype is not None:
            self.allocate(device, dtype)

    def allocate(self, device: torch.device | str, dtype: torch.dtype) -> None:
        """Makes the pools, once; arguments given to the constructor win. The first forward calls it."""
        if self.pool is not None:
            return
        with torch.inference_mode(False):  # tensors made in inference mode could not be changed outside of it
            self._allocate(torch.device(self._device or device), self._dtype or dtype)

    def _allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        latent_dtype, index_dtype = self._dtypes
        pages = -(-self.max_cache_len // PAGE)
        pool = PagePool(
            self.layer_configs,
            num_pages=self.max_batch_size * pages,
            max_requests=self.max_batch_size,
            max_len=self.max_cache_len,
            latent_dtype=latent_dtype or dtype,
            index_dtype=index_dtype or (FP8 if supports_fp8(device) else dtype),
            device=device,
        )
        for request in range(self.max_batch_size):
            pool.reserve(request, self.max_cache_len)
        device = pool.page_table.device
        self._length = torch.zeros((), dtype=torch.int64, device=device)
        self._new_columns = torch.zeros((), dtype=torch.int64, device=device)  # of a forward padded to a bucket
        self._kv_len = torch.zeros(self.max_batch_size, dtype=torch.int64, device=device)
        self._real = torch.ones(self.max_batch_size, self.max_cache_len, dtype=torch.bool, device=device)
        for tensor in (self._length, self._new_columns, self._kv_len, self._real):
            torch._dynamo.mark_static_address(tensor, guard=False)
        self.pool = pool

    def check_model(self, layer_configs: Sequence[DSAConfig], dtype: torch.dtype) -> None:
        """Raises ValueError unless the cache can serve a model of these layers, whose hidden states have this dtype."""
        if [_cached_sizes(c) for c in layer_configs] != [_cached_sizes(c) for c in self.layer_configs]:
            raise ValueError("config of the PagedCache is not that of the model: layers or sizes of the caches differ")
        for name, cached in zip(("latent_dtype", "index_dtype"), self._dtypes):
            cached = cached or self._dtype or dtype
            if cached not in (dtype, FP8):
                raise ValueError(f"{name}={cached}; the model computes in {dtype}, so it must be that or {FP8}")

    # ---- what transformers asks ----------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0):
        """Columns so far: an int, or inside a trace a 0-d tensor."""
        return self.columns_on_device() if torch.compiler.is_compiling() else self.columns()

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        if not torch.compiler.is_compiling() and self._begun is None:  # else begin() has checked, before any padding
            self.check_fits(None, query_length)
        # The mask of layers with a window, which transformers would build over queries and keys, is not read: the least
        return (1, 0) if self.layers[layer_idx].is_sliding else (self.max_cache_len, 0)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.max_cache_len

    get_max_cache_shape = get_max_length  # the name before transformers 5.23

    # ---- what the host knows -------------------------------------------------------------------------------------

    def columns(self) -> int:
        """Columns held so far. Waits for the device only after a forward that was compiled whole."""
        if self._begun is not None or self._batch is not None:  # announced, or failed between layers
            return self._before[0]
        if self._columns is None:
            held = int(self._length)
            if held > self.max_cache_len:
                raise ValueError(
                    f"{held} tokens were given to max_cache_len={self.max_cache_len} by forwards compiled as a whole, "
                    "which cannot check; what did not fit is lost, call reset()"
                )
            self._columns = held
        return self._columns

    def columns_on_device(self) -> Tensor:
        """Columns held so far, int64 0-d, as a copy."""
        if self.pool is None:
            raise ValueError("device=None or dtype=None: give both to PagedCache when its first forward is compiled")
        return self._length.clone()

    def check_fits(self, batch_size: int | None, query_length: int) -> None:
        """Raises ValueError unless a step of this size fits."""
        if query_length < 1:
            raise ValueError(f"query_length={query_length}; a step has at least one token a row")
        if batch_size is not None and batch_size > self.max_batch_size:
            raise ValueError(f"batch size {batch_size} does not fit max_batch_size={self.max_batch_size}")
        if batch_size is not None and self._rows not in (0, batch_size):
            raise ValueError(f"batch size {batch_size}; the cache holds {self._rows} rows, call reset() first")
        if self.columns() + query_length > self.max_cache_len:
            raise ValueError(
                f"{self.columns()} + {query_length} tokens do not fit max_cache_len={self.max_cache_len}; "
                "make a larger PagedCache or call reset()"
            )

    def begin(self, batch_size: int, query_length: int, attention_mask: Tensor | None) -> Tensor | None:
        """Announces a forward: checks that it fits and notes what its trace may assume. Eager, before the forward.

        Args:
            attention_mask: 2D mask over the columns so far and the new ones, or None.

        Returns:
            bool [B, max_cache_len], True where a column holds a token, or None when no column so far is padding.
        """
        self._take_back()
        self.check_fits(batch_size, query_length)
        held, total = self.columns(), self.columns() + query_length
        before = (held, self._rows, self._padded)
        if attention_mask is not None:
            attention_mask = self._checked_mask(attention_mask, batch_size, held, total)
        elif self._padded:
            if not bool(self._real[:batch_size, :held].all()):
                raise ValueError("attention_mask=None; the cache holds padding columns, later steps must mask them too")
            self._padded = False  # what was padding has been cropped or reordered away
        self._begun, self.new_tokens = (total <= self.index_topk, False), query_length
        self._before, self._columns, self._rows = before, total, batch_size
        return attention_mask

    def _take_back(self) -> None:
        """Forgets a forward that was announced and then failed, before layer 0 or between layers."""
        if self._begun is None and self._batch is None:
            return
        if self.pool is not None:  # its lengths may have advanced: some layers ran, or compiled code until it failed
            self._set_length(self._before[0])
        (self._columns, self._rows, self._padded), self._begun, self._batch = self._before, None, None

    def _set_length(self, columns: int) -> None:
        self._length.fill_(columns)
        self._kv_len.copy_(self._real[:, :columns].sum(1))
        self._real[:, columns:] = True

    def _checked_mask(self, mask: Tensor, batch_size: int, held: int, total: int) -> Tensor | None:
        if mask.dim() != 2 or mask.shape[0] != batch_size or mask.shape[1] < total:
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}; with PagedCache it must be [{batch_size}, {total}], "
                "one entry a column. Masks over queries and keys need a cache of transformers"
            )
        mask = mask.bool()
        if not self._padded and bool(mask[:, :total].all()):
            return None
        before = self._real[:batch_size, :held] if self.pool is not None else mask[:, :0]
        if not torch.equal(mask[:, :held].to(before.device), before):
            raise ValueError("attention_mask changes columns that are already cached; it may only append columns")
        self._padded = True
        mask = fit_columns(mask, self.max_cache_len)
        return mask & (torch.arange(self.max_cache_len, device=mask.device) < total)

    # ---- what a forward reads ------------------------------------------------------------------------------------

    def step(
        self, layer_idx: int, hidden_states: Tensor, columns_real: Tensor | None
    ) -> tuple[Batch, LayerPools, Tensor | None]:
        """The batch of the forward under way, the pools of a layer and where its window starts in each row, if it has
        one (None: nowhere in particular). Layer 0 advances the lengths.

        Args:
            hidden_states: [B, S, hidden].
            columns_real: bool [B, max_cache_len], as ``begin`` and ``column_mask`` give it, or None.
        """
        if layer_idx == 0:
            if not torch.compiler.is_compiling():
                if self._begun is None:  # called without the hook of replace_attention, as a submodule
                    columns_real = self.begin(hidden_states.shape[0], hidden_states.shape[1], columns_real)
                self.allocate(hidden_states.device, hidden_states.dtype)
            self._batch = self._advance(hidden_states, columns_real)
        if self._batch is None or self.pool is None:
            raise ValueError(f"layer {layer_idx} was called before layer 0 of the same forward")
        batch, pools = self._batch, self.pool.layers[layer_idx]
        if pools.latents.device != hidden_states.device:
            raise ValueError(f"hidden states are on {hidden_states.device}; PagedCache lies on {pools.latents.device}")
        start = self._window_start(layer_idx, hidden_states.shape[0])
        if layer_idx == len(self.layers) - 1:
            self._batch = self._step_columns = None
        return batch, pools, start

    def _window_start(self, layer_idx: int, batch_size: int) -> Tensor | None:
        """First position int64 [T] that each row of the forward under way attends in a layer with a window.

        A window counts columns, padding included, as in transformers. None: no column is padding, or no window.
        """
        window, columns = self.layer_configs[layer_idx].window, self._step_columns
        if window is None or columns is None:
            return None
        tokens = self._real[:batch_size].cumsum(1)  # [B, columns], of each row up to a column
        edge = columns - window  # the last column that is out of reach
        return torch.where(edge < 0, 0, tokens[:, edge.clamp(0, self.max_cache_len - 1)]).flatten()

    def _advance(self, hidden_states: Tensor, columns_real: Tensor | None) -> Batch:
        B, S, _ = hidden_states.shape
        held, new = self.columns_on_device(), torch.arange(S, device=self._length.device)
        announced, self._begun = self._begun, None
        skip_scores, padded = announced or (False, False)
        step: Tensor | int = self._new_columns if padded else S
        real, self._step_columns = None, None
        if columns_real is not None:
            self._step_columns = held + new
            later = torch.arange(self.max_cache_len, device=new.device) >= held + step
            self._real[:B] = columns_real | later  # what is not reached yet is no padding
            real = columns_real[:, (held + new).clamp(max=self.max_cache_len - 1)]
        if announced is None:  # compiled whole: the host did not see this step, nor whether it fits
            self._columns, self._rows = None, B
        if announced is None or padded:
            inside = (new < step if padded else held + new < self.max_cache_len).expand(B, S)
            real = inside if real is None else real & inside
        past = self._kv_len[:B]
        batch = Batch.from_grid(real, past, self.pool.page_table[:B], S, skip_scores=skip_scores)
        past.copy_(batch.kv_len)
        self._length.add_(step)
        return batch

    # ---- what a CUDA graph needs to know (graphs/buffers.py: GraphState) -------------------------------------------

    def advanced_tensors(self) -> list[Tensor]:
        """The lengths. What a forward writes into the pools it writes again, in the same slots, when repeated."""
        return [self._length, self._kv_len]

    def trace_facts(self) -> tuple[bool, bool] | None:
        """Of the announced forward, beside shapes: are scores skipped, is it padded. None: nothing is announced."""
        return self._begun

    def set_trace_facts(self, facts: tuple[bool, bool] | None) -> None:
        """Announces the forward again, or with None takes note that a replay served it."""
        self._begun = facts

    def signature(self) -> tuple:
        return self.max_cache_len, self.pool.signature()

    def pad_step(self, padded: bool = True) -> None:
        """The announced forward will come padded: columns past its last token are no tokens and store nothing."""
        self._begun = self._begun[0], padded
        if padded:
            self._new_columns.fill_(self.new_tokens)

    # ---- what generate() does between forwards -------------------------------------------------------------------

    def reset(self) -> None:
        """Forgets all tokens; the pools stay where they are."""
        self._take_back()
        self._columns, self._rows, self._padded, self._batch = 0, 0, False, None
        if self.pool is not None:
            self._length.zero_()
            self._kv_len.zero_()
            self._real.fill_(True)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` columns (the argument is at most 0, as in transformers 5.23)."""
        self._take_back()
        held, tokens_to_remove = self.columns(), int(tokens_to_remove)  # transformers 5.17 passes a 0-d tensor
        if not -held <= tokens_to_remove <= 0:
            raise ValueError(f"tokens_to_remove={tokens_to_remove}; it must be between -{held} and 0")
        if tokens_to_remove == 0:
            return
        self._columns = held = held + tokens_to_remove
        self._rows = self._rows if held else 0
        self._set_length(held)
        self._padded = self._padded and held > 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes a copy of row ``beam_idx[b]``, in place."""
        self._take_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes ``repeats`` rows."""
        self._take_rows(torch.arange(self._rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows ``indices``, in that order."""
        self._take_rows(torch.arange(self._rows)[indices.cpu()])

    def _take_rows(self, rows: Tensor) -> None:
        self._take_back()
        if rows.numel() > self.max_batch_size:
            raise ValueError(f"{rows.numel()} rows do not fit max_batch_size={self.max_batch_size}")
        if self.pool is None or self.columns() == 0:
            return
        rows = rows.to(self._length.device)
        self.pool.reorder(rows, -(-self.columns() // PAGE))
        n = rows.numel()
        self._kv_len[:n] = self._kv_len[rows]
        self._real[:n] = self._real[rows]
        self._rows = n
