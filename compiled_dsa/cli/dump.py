"""``python -m compiled_dsa dump``: a small random model, compiled, and a report of what torch.compile made of it."""

import argparse
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from compiled_dsa.compile import RUNTIMES, compile_model
from compiled_dsa.graphs.report import Report, report
from compiled_dsa.graphs.report_code import EXTERN, KERNEL, OP

MODELS = ("deepseek_v32", "glm_moe_dsa")
BATCH = 2


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of ``python -m compiled_dsa``."""
    parser = commands.add_parser(
        "dump",
        help="write what torch.compile makes of a small model: layers, pieces, cuts, kernels, guards",
        description="Builds a small random model, runs a prefill and a few decode steps compiled, and writes "
        "DIR/index.html and DIR/index.md. Needs transformers; depyf adds the bytecode.",
    )
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="folder to write, made if need be")
    parser.add_argument("--layers", type=int, default=2, help="number of layers (default 2)")
    parser.add_argument("--prompt", type=int, default=100, help="tokens of the prompt (default 100; top-k is 64)")
    parser.add_argument("--tokens", type=int, default=4, help="tokens to generate (default 4; 1: the prefill alone)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--graphs", choices=tuple(RUNTIMES), default="auto", help="as in compile_model (default auto)")
    parser.set_defaults(run=lambda arguments: run(parser, arguments))


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    for name in ("layers", "prompt", "tokens"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}={getattr(arguments, name)}; it must be at least 1")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda: torch sees no GPU")
    try:
        result = dump(arguments)
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    show(result, Console(highlight=False, soft_wrap=True))


def dump(arguments: argparse.Namespace) -> Report:
    from compiled_dsa.huggingface import PagedCache, replace_attention
    from compiled_dsa.huggingface.small_models import SMALL, model_config, random_model

    # bf16 on a GPU, as models run there; experts of transformers need not fit into a graph, so MLPs are dense
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    config = model_config(arguments.model, arguments.layers, first_k_dense_replace=arguments.layers, **SMALL)
    model = replace_attention(random_model(config, seed=0, device=arguments.device, dtype=dtype))
    model = compile_model(model, arguments.graphs)
    prompt = torch.randint(1, config.vocab_size, (BATCH, arguments.prompt), device=arguments.device)
    cache = PagedCache(config, BATCH, arguments.prompt + arguments.tokens)
    title = f"{arguments.model}, layers: {arguments.layers}, tokens of a prompt: {arguments.prompt}"
    with report(arguments.output, title) as result:
        model.generate(prompt, max_new_tokens=arguments.tokens, do_sample=False, past_key_values=cache)
    return result


def show(result: Report, console: Console) -> None:
    """Where the report is, and what each layer of each graph launches."""
    for graph in result.graphs:
        pieces = len(graph.sequence()) - graph.cuts
        table = Table("layer", title=f"{graph.title}\n{pieces} pieces, {graph.cuts} cuts", title_justify="left")
        for head in ("kernels", "library calls", "custom ops", "cuts", "launches"):
            table.add_column(head, justify="right")
        for layer in graph.layers:
            counts = (*(layer.count(kind) for kind in (KERNEL, EXTERN, OP)), layer.cuts, layer.launches)
            table.add_row(layer.name, *map(str, counts))
        console.print(table)
    console.print(f"graph breaks: {sum(result.breaks.values())}")
    for note in result.notes:
        console.print(f"not seen: {note}")
    console.print(f"report: {result.page}")
