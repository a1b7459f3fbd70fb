"""Where CUDA graphs would replay other adapters than a model has now, its forward raises, and only there."""

import time

import pytest
import torch
from torch import nn

from compiled_dsa import SparseAttention, compile_model
from compiled_dsa.batch import DECODE, PREFILL
from compiled_dsa.huggingface import PagedCache, replace_attention
from compiled_dsa.weights import AdapterWatch
from tests.huggingface.test_adapters import ATTENTION, INDEXER, add_adapter
from tests.huggingface.tiny_models import prompt, tiny_model
from tests.modules.layers import Serving, our_layer, stock_layer

REPLAYED = "what a graph replayed"
REFUSED = "adapters were added, removed, .* graphs='off'"
MIDDLE = {"layers_to_transform": [1], "layers_pattern": "layers"}
WHERE = {
    "attention": (["q_b_proj"], {}),
    "indexer": (INDEXER, {}),
    "mlp": (["gate_proj", "up_proj"], {}),
    "lm_head": (["lm_head"], {}),
    "embeddings": (["embed_tokens"], {}),
    "middle layer": (["q_b_proj"], MIDDLE),
    "middle indexer": (["wk"], MIDDLE),
}


@pytest.fixture
def on_gpu(monkeypatch):
    """Gives a compiled model what stands for its captured graphs: forwards of both kinds end there, as on a GPU."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def graphed(model):
        forwards = compile_model(model, backend="eager").end_warm_up.__self__
        forwards.runners = dict.fromkeys((DECODE, PREFILL), lambda step: REPLAYED)
        return model

    return graphed


def forward(model, tokens: int = 6):
    with torch.no_grad():
        return model(prompt(1, tokens), past_key_values=PagedCache(model.config, 1, 32))


def adapted(where: str, **sizes) -> nn.Module:
    """With two adapters, the first of them active."""
    targets, options = WHERE[where]
    model = tiny_model("deepseek_v32", **sizes)
    for seed, name in enumerate(("first", "second")):
        add_adapter(model, name, targets, seed, **options)
    model.set_adapter("first")
    return replace_attention(model)


def lora_layers(model: nn.Module) -> list:
    return [m for m in model.modules() if hasattr(m, "get_delta_weight")]


def merge(model, targets, options):
    for layer in lora_layers(model):
        layer.merge()


def rescale(model, targets, options):
    lora_layers(model)[-1].set_scale("first", 3)


def replace(model, targets, options):
    model.delete_adapter("first")
    add_adapter(model, "first", targets, **options)
    model.set_adapter("first")


CHANGES = {
    "add": lambda model, targets, options: add_adapter(model, "third", targets, **options),
    "add elsewhere": lambda model, *_: add_adapter(model, "third", ["kv_a_proj_with_mqa"], layers_to_transform=[1]),
    "switch": lambda model, *_: model.set_adapter("second"),
    "switch one": lambda model, *_: lora_layers(model)[-1].set_adapter("second"),
    "both": lambda model, *_: model.set_adapter(["first", "second"]),
    "disable": lambda model, *_: model.disable_adapters(),
    "merge": merge,
    "scale": rescale,
    "remove": lambda model, *_: model.delete_adapter("first"),
    "replace": replace,
}


@pytest.mark.parametrize(
    ("where", "change"),
    [("indexer", change) for change in CHANGES]
    + [
        (where, change) for where in WHERE if where != "indexer" for change in ("add", "switch one", "disable", "merge")
    ],
)
def test_changes_are_refused(where, change, on_gpu):
    model = on_gpu(adapted(where))
    assert forward(model) == forward(model) == REPLAYED
    CHANGES[change](model, *WHERE[where])
    for tokens in (6, 12):  # of both kinds, and again
        with pytest.raises(ValueError, match=REFUSED):
            forward(model, tokens)


@pytest.mark.parametrize("where", ["indexer", "lm_head"])
def test_the_first_adapter_is_refused(where, on_gpu):
    model = on_gpu(replace_attention(tiny_model("deepseek_v32")))
    assert forward(model) == REPLAYED
    add_adapter(model, "first", WHERE[where][0])
    with pytest.raises(ValueError, match=REFUSED):
        forward(model)


def test_changes_before_the_first_forward_count_for_nothing(on_gpu):
    model = on_gpu(adapted("indexer"))
    model.set_adapter("second")
    add_adapter(model, "third", ["lm_head"])
    assert forward(model) == forward(model) == REPLAYED


def test_weights_may_change_in_place(on_gpu):
    model = on_gpu(adapted("indexer"))
    assert forward(model) == REPLAYED
    with torch.no_grad():
        for layer in lora_layers(model):
            layer.lora_A["first"].weight.mul_(2)
    assert forward(model) == REPLAYED


def test_what_is_changed_back_is_replayed_again(on_gpu):
    model = on_gpu(adapted("middle indexer"))
    assert forward(model) == REPLAYED
    layers = lora_layers(model)
    for change, undo in (
        (model.disable_adapters, model.enable_adapters),
        (lambda: model.set_adapter("second"), lambda: model.set_adapter("first")),
        (lambda: [layer.merge() for layer in layers], lambda: [layer.unmerge() for layer in layers]),
        (lambda: add_adapter(model, "third", ["wk"], **MIDDLE), lambda: model.delete_adapter("third")),
    ):
        change()
        with pytest.raises(ValueError, match=REFUSED):
            forward(model)
        undo()
        model.set_adapter("first")
        assert forward(model) == REPLAYED


def test_forwards_without_a_graph_follow_the_adapters(on_gpu):
    model = on_gpu(adapted("lm_head", num_hidden_layers=1, first_k_dense_replace=1))
    with torch.no_grad():
        before = model(prompt(1, 6)).logits  # no PagedCache
        assert forward(model) == REPLAYED
        model.disable_adapters()
        assert (model(prompt(1, 6)).logits - before).abs().max() > 1e-2
        with pytest.raises(ValueError, match=REFUSED):
            forward(model)


def test_modules_trained_whole(on_gpu):
    """peft's wrapper of these switches between modules, without LoRA."""
    model = tiny_model("deepseek_v32")
    add_adapter(model, "first", ["q_b_proj"], modules_to_save=["lm_head"])
    model = on_gpu(replace_attention(model))
    assert forward(model) == REPLAYED
    model.lm_head.enable_adapters(False)
    with pytest.raises(ValueError, match=REFUSED):
        forward(model)


# ---- models of one's own ---------------------------------------------------------------------------------------------


class Own(nn.Module):
    """One layer over a Batch and a head; nothing says that it is one of ours."""

    def __init__(self, layer: SparseAttention):
        super().__init__()
        self.attention, self.head = layer, nn.Linear(64, 7, bias=False)

    def forward(self, x, cos, sin, batch, pools):
        return self.head(self.attention(x, cos, sin, batch, pools)[0])


@pytest.mark.parametrize("change", ["add", "add elsewhere", "switch", "disable", "merge"])
@pytest.mark.parametrize(("own", "targets"), [(False, INDEXER), (True, ["wq_b"]), (True, ["head"])])
def test_models_over_a_batch(own, targets, change, on_gpu):
    import peft

    layer = our_layer(stock_layer("deepseek_v32", torch.float32))
    serving = Serving.of([layer], [torch.randn(20, 64)])
    model = Own(layer) if own else layer
    for name in ("first", "second"):  # the second is active then
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules=targets), model, name)
    on_gpu(model)

    def step():
        with torch.no_grad():
            return model(*serving.inputs([2]), serving.pool.layers[0])

    assert step() == step() == REPLAYED
    layers = lora_layers(model)
    if change.startswith("add"):
        config = peft.LoraConfig(target_modules=targets if change == "add" else ["o_proj"])
        peft.inject_adapter_in_model(config, model, "third")
    for adapter in layers:
        if change == "switch":
            adapter.set_adapter("first")
        elif change == "disable":
            adapter.enable_adapters(False)
        elif change == "merge":
            adapter.merge()
    with pytest.raises(ValueError, match=REFUSED):
        step()


# ---- what a watch costs ----------------------------------------------------------------------------------------------


def test_modules_are_walked_only_when_some_were_assigned(monkeypatch):
    model = adapted("attention")
    watch, walks, modules = AdapterWatch(model), [], type(model).modules
    monkeypatch.setattr(type(model), "modules", lambda self: walks.append(1) or modules(self))
    assert not watch.changed() and not walks
    model.model.layers[1].mlp.more = nn.Sequential(nn.Linear(2, 2))  # no adapter
    assert not watch.changed() and walks
    walks.clear()
    assert not watch.changed() and not walks
    model.model.layers[1].mlp.more.append(nn.Linear(2, 2))
    assert not watch.changed() and walks
    add_adapter(model, "third", ["more.1"])
    assert watch.changed()


def test_a_look_at_all_layers_is_quick():
    model = tiny_model("deepseek_v32", num_hidden_layers=20)
    add_adapter(model, "first", ATTENTION + INDEXER)
    watch, seconds = AdapterWatch(model), []
    for _ in range(5):
        start = time.perf_counter()
        assert not watch.changed()
        seconds.append(time.perf_counter() - start)
    # 1 us each on two slow cores, where a walk over the modules takes 150 for each
    assert min(seconds) < 2e-5 * len(lora_layers(model))
