"""Examples at the end of every help: command lines by command, without the program's name."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": ("choose -m smollm2", "generate -p 'What is a key-value cache?'", "estimate -m qwen3-8b --memory 24GB"),
    "generate": (
        "generate -p 'What is a key-value cache?' --compare",
        "generate -f book.txt -q 'Who is the narrator?' -r kivi:bits=4",
        "generate -f book.txt -q 'Who?' --dtype bfloat16 --prefill-chunk 512",
    ),
    "eval": (
        "eval divergence -r default -r kivi:bits=2..4 --prefix 1k",
        "eval divergence -r default -r safe --prefix 1k --across",
        "eval passkey needle -r safe --lengths 2k,4k --samples 20 -o results",
        "eval perplexity -r default --text book.txt --format md",
    ),
    "calibrate": ("calibrate -r trellis:bits=3", "calibrate -r kvquant:bits=2..4 --text book.txt -o folder"),
    "chat": ("chat smollm2", "chat Qwen/Qwen2.5-Coder-0.5B-Instruct -f book.txt -r kivi:bits=4"),
    "serve": ("serve smollm2", "serve Qwen/Qwen3-8B --engine vllm -- --max-model-len 32768"),
    "choose": (
        "choose -m qwen3-8b --memory 24GB --context 128k",
        "choose -m smollm2 --try book.txt",
    ),
    "list": ("list", "list kivi", "list snapkv", "list --format csv"),
    "estimate": (
        "estimate -m llama-3.1-8b --memory 24GB",
        "estimate -m qwen3-8b -r default -r kivi:bits=4 -c 16k,64k",
        "estimate -m gemma-3-12b --prefill-chunk 512 --format md",
    ),
    "models": ("models list", "models pull smollm2"),
    "models list": ("models list", "models list --format csv"),
    "models pull": ("models pull smollm2", "models pull qwen.gguf"),
    "models verify": ("models verify smollm2",),
    "prompt-cache": (
        "prompt-cache build -f book.txt -o book.cache",
        "generate -f book.txt -q 'Who?' --prompt-cache book.cache",
    ),
    "prompt-cache build": (
        "prompt-cache build -f book.txt -o book.cache",
        "prompt-cache build -f book.txt -r kivi:bits=4 -m smollm2 -o book.cache",
        "prompt-cache build -f book.txt --storage 2 -o book.stored",
    ),
    "prompt-cache load": ("prompt-cache load book.stored -r default -o book.cache",),
    "prompt-cache info": ("prompt-cache info book.cache",),
    "prompt-cache verify": ("prompt-cache verify book.cache", "prompt-cache verify book.cache -m smollm2"),
    "doctor": ("doctor", "doctor --all", "doctor qwen2.5-7b -r kivi:bits=4 -r default"),
    "demo": ("demo", "demo -r kivi:bits=2 --tokens 3000"),
    "plot": ("plot angles -m smollm2 -o angles.png", "plot pareto results -o pareto.svg"),
    "report": ("report results -o report.html",),
    "bench": ("bench attend --tokens 8k", "bench generate -r default --context 1k,4k"),
    "bench attend": ("bench attend", "bench attend --formats grid4,grid2 --tokens 8k,32k --threads 1,2"),
    "bench generate": (
        "bench generate -r default -r kivi:bits=4 --context 1k,4k",
        "bench generate -r quanto-4 --prefill-chunk 512 -o speed.jsonl",
    ),
}


def of(command: str) -> str | None:
    """Return the examples of a command as paragraphs, as typer prints them below a help."""
    lines = EXAMPLES.get(command, ())
    return "\n\n".join(["Examples:", *(f"tersekv {line}" for line in lines)]) if lines else None
