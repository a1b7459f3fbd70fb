"""Small random models of the DSA family, built by transformers from the family's own configs."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

MODELS = ("deepseek_v32", "glm_moe_dsa")

SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_n_heads": 64,  # with few heads many scores are exactly 0, and ties are broken differently everywhere
    "index_head_dim": 64,
    "index_topk": 64,
}

SMALL_MLP = {  # true attention sizes, and little else
    "vocab_size": 1024,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}


def model_config(name: str, num_layers: int, **sizes):
    """A config of ``name`` with ``num_layers`` layers; sizes not given keep the model's own defaults."""
    overrides = {
        "num_hidden_layers": num_layers,
        "first_k_dense_replace": 1,
        "pad_token_id": 0,
        "eos_token_id": None,
        **sizes,
    }
    if name == "glm_moe_dsa":  # every third layer selects, the two after it share its selection
        overrides["indexer_types"] = ["shared" if i % 3 else "full" for i in range(num_layers)]
    return AutoConfig.for_model(name, **overrides)


def random_model(config, *, seed: int, device: str, dtype: torch.dtype, std: float = 0.08) -> PreTrainedModel:
    """A model of random weights in eval mode; ``std`` is that of its matrices."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    generator = torch.Generator(device=device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter.data, std=std, generator=generator)
    return model
