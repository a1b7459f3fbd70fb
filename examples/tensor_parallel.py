"""Generates with a converted model whose weights are spread over several ranks, and compares the tokens.

    python examples/tensor_parallel.py --ranks 2
    python examples/tensor_parallel.py --ranks 2 --device cuda --compile

The model is a small random one. One process generates with the untouched model; then every rank loads its part of the
weights by transformers' own tensor-parallel plan (heads are split; each rank runs the whole indexer), replaces the
attention and generates into a ``PagedCache``. Ranks talk through gloo on a CPU and NCCL on GPUs, one for each rank. The
last line is ``identical tokens: N/N``, counted over all ranks; the exit status is 1 when tokens differ.
"""

import argparse
import os
import socket
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from compiled_dsa import compile_model
from compiled_dsa.huggingface import PagedCache, replace_attention
from compiled_dsa.huggingface.small_models import MODELS, SMALL, model_config, random_model

BATCH, PROMPT, NEW_TOKENS = 2, 100, 20
OPTIONS = {"max_new_tokens": NEW_TOKENS, "do_sample": False}


def generate_on_rank(rank: int, folder: Path, port: int, args: argparse.Namespace) -> None:
    """What each process does; leaves its tokens [B, NEW_TOKENS] in the folder."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(args.ranks), **address})
    if args.device == "cpu":
        torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", distributed_config=DistributedConfig(tp_size=args.ranks), dtype=torch.float32
    ).eval()
    model = replace_attention(model)
    if args.compile:
        model = compile_model(model, graphs="off")
    prompt = torch.load(folder / "prompt.pt").to(model.device)
    cache = PagedCache(model.config, BATCH, PROMPT + NEW_TOKENS, index_dtype=torch.float32)
    tokens = model.generate(prompt, past_key_values=cache, **OPTIONS)[:, PROMPT:]
    torch.save(tokens.cpu(), folder / f"tokens{rank}.pt")
    torch.distributed.barrier()
    if args.device == "cpu":
        torch.distributed.destroy_process_group()
    else:  # with groups of a DeviceMesh, torch 2.11 waits for ever for NCCL there, on all ranks: the process ends as is
        os._exit(0)


def compare(args: argparse.Namespace, folder: Path) -> int:
    """The main job; returns the exit status."""
    console = Console(soft_wrap=True, highlight=False)
    dense = args.layers if args.device == "cuda" else 1
    config = model_config(args.model, args.layers, first_k_dense_replace=dense, **SMALL)
    stock = random_model(config, seed=args.seed, device=args.device, dtype=torch.float32)
    prompt = torch.randint(1, config.vocab_size, (BATCH, PROMPT), device=args.device)
    expected = stock.generate(prompt, **OPTIONS)[:, PROMPT:].cpu()
    stock.save_pretrained(folder / "model")
    torch.save(prompt.cpu(), folder / "prompt.pt")
    console.print(f"{args.model}: {args.layers} layers, {config.num_attention_heads} heads over {args.ranks} ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(generate_on_rank, (folder, port, args), nprocs=args.ranks)
    tokens = [torch.load(folder / f"tokens{rank}.pt") for rank in range(args.ranks)]
    same, total = sum(int((t == expected).sum()) for t in tokens), args.ranks * expected.numel()
    console.print(f"identical tokens: {same}/{total}")
    return 0 if same == total else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes; must divide the 8 heads (default 2)")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, default=2, help="number of layers (default 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="compile the forward of every rank")
    args = parser.parse_args()
    if args.layers < 1:
        parser.error(f"--layers={args.layers}; it must be at least 1")
    if args.ranks < 1 or SMALL["num_attention_heads"] % args.ranks:
        parser.error(f"--ranks={args.ranks}; it must divide the {SMALL['num_attention_heads']} heads")
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        parser.error(f"--device=cuda: {args.ranks} ranks need as many GPUs, torch sees {torch.cuda.device_count()}")
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers takes GPUs where there are any
    with tempfile.TemporaryDirectory() as folder:
        return compare(args, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
