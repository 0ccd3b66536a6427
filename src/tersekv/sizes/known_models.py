"""Cache shapes and parameter counts of published models by name, without a config file.

The figures are those of each model's config.json on the Hub (`hub` is the repository), read in
public copies. Llama, Qwen and Gemma: litgpt/config.py (Lightning-AI/litgpt). Gemma's sliding
windows: also models/gemma3/convert_gemma3_weights.py (huggingface/transformers). Mistral Nemo and
Small: copies of their files. Gemma 3 from 4B on also has an image encoder; its figures are those of
the text model only. Models with latent attention: the defaults of transformers' configs of these models,
and copies of their files.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import torch

from tersekv.sizes.cache_size import CacheShape
from tersekv.sizes.estimate import KNOWN, Widths
from tersekv.transforms.rope import standard_rope


@dataclass(frozen=True)
class KnownModel:
    """Figures of a config.json.

    kind: transformers' model_type.
    mlp: intermediate size.
    tied: True if input and output embedding are the same.
    window: sliding window in tokens, or None.
    full_every: every `full_every`-th layer has full attention, or None.
    reads: longest context in tokens (max_position_embeddings).
    """

    name: str
    hub: str
    kind: str
    layers: int
    kv_heads: int
    head_dim: int
    query_heads: int
    hidden: int
    mlp: int
    vocabulary: int
    tied: bool
    window: int | None
    full_every: int | None
    reads: int

    @property
    def shape(self) -> CacheShape:
        """Shape of the model's cache, in bfloat16."""
        full = [self.full_every is not None and (i + 1) % self.full_every == 0 for i in range(self.layers)]
        windows = tuple(None if is_full else self.window for is_full in full)
        ropes = {is_full: standard_rope(self.head_dim, THETA[self.kind][is_full]) for is_full in set(full)}
        by_layer = tuple(ropes[is_full] for is_full in full)
        dims = self.kv_heads, self.head_dim, self.head_dim
        return CacheShape(windows, *dims, ropes=by_layer, query_heads=self.query_heads)

    @property
    def widths(self) -> Widths:
        """Widths on which activations depend."""
        return Widths(self.hidden, self.mlp, self.vocabulary)

    @property
    def key_biases(self) -> bool:
        """True if the projection of keys has a bias."""
        return self.kind == "qwen2"

    @property
    def parameters(self) -> int:
        """Number of parameters: embeddings, and per layer attention, gated MLP, norms and
        biases.
        """
        queries, keys = self.query_heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * (queries + keys)
        biases = queries + 2 * keys if self.key_biases else 0
        head_norms = 2 * self.head_dim if self.kind in ("qwen3", "gemma3_text") else 0
        norms = (4 if self.kind == "gemma3_text" else 2) * self.hidden
        layer = attention + biases + head_norms + norms + 3 * self.hidden * self.mlp
        return (1 if self.tied else 2) * self.vocabulary * self.hidden + self.layers * layer + self.hidden


@dataclass(frozen=True)
class KnownLatent:
    """Figures of a model with latent attention.

    latent, rotated: channels of latents and of rotated keys (kv_lora_rank, qk_rope_head_dim).
    index: channels of the indexer's keys, 0 without one.
    parameters: their number, counted from the config.
    reads: longest context in tokens.
    """

    name: str
    hub: str
    kind: str
    layers: int
    query_heads: int
    latent: int
    rotated: int
    index: int
    parameters: int
    reads: int

    widths = None  # those of experts are not known
    key_biases = False

    @property
    def shape(self) -> CacheShape:
        """Shape of the model's cache, in bfloat16."""
        none, index = (None,) * self.layers, (self.index,) * self.layers if self.index else ()
        return CacheShape(none, 1, self.latent, self.rotated, torch.bfloat16, none, self.query_heads, True, index)


THETA = {
    "llama": (500_000.0, 500_000.0),
    "qwen2": (1e6, 1e6),
    "qwen3": (1e6, 1e6),
    "mistral": (1e6, 1e6),
    "gemma3_text": (10_000.0, 1e6),
}
"""Base of RoPE of sliding-window layers and of full-attention layers.

The two are equal in models without a sliding window. The base determines the size of RoPE's step
table, some kB.
"""

# The columns are the fields of `KnownModel`. A dash is None.
TABLE = """
llama-3-8b        meta-llama/Meta-Llama-3-8B            llama        32  8 128  32  4096 14336 128256  no    - -   8192
llama-3-70b       meta-llama/Meta-Llama-3-70B           llama        80  8 128  64  8192 28672 128256  no    - -   8192
llama-3.1-8b      meta-llama/Llama-3.1-8B               llama        32  8 128  32  4096 14336 128256  no    - - 131072
llama-3.1-70b     meta-llama/Llama-3.1-70B              llama        80  8 128  64  8192 28672 128256  no    - - 131072
llama-3.1-405b    meta-llama/Llama-3.1-405B             llama       126  8 128 128 16384 53248 128256  no    - - 131072
llama-3.2-1b      meta-llama/Llama-3.2-1B               llama        16  8  64  32  2048  8192 128256 yes    - - 131072
llama-3.2-3b      meta-llama/Llama-3.2-3B               llama        28  8 128  24  3072  8192 128256 yes    - - 131072
llama-3.3-70b     meta-llama/Llama-3.3-70B-Instruct     llama        80  8 128  64  8192 28672 128256  no    - - 131072
qwen2.5-0.5b      Qwen/Qwen2.5-0.5B                     qwen2        24  2  64  14   896  4864 151936 yes    - -  32768
qwen2.5-1.5b      Qwen/Qwen2.5-1.5B                     qwen2        28  2 128  12  1536  8960 151936 yes    - - 131072
qwen2.5-3b        Qwen/Qwen2.5-3B                       qwen2        36  2 128  16  2048 11008 151936 yes    - -  32768
qwen2.5-7b        Qwen/Qwen2.5-7B                       qwen2        28  4 128  28  3584 18944 152064  no    - - 131072
qwen2.5-14b       Qwen/Qwen2.5-14B                      qwen2        48  8 128  40  5120 13824 152064  no    - - 131072
qwen2.5-32b       Qwen/Qwen2.5-32B                      qwen2        64  8 128  40  5120 27648 152064  no    - - 131072
qwen2.5-72b       Qwen/Qwen2.5-72B                      qwen2        80  8 128  64  8192 29568 152064  no    - - 131072
qwen3-0.6b        Qwen/Qwen3-0.6B                       qwen3        28  8 128  16  1024  3072 151936 yes    - -  40960
qwen3-1.7b        Qwen/Qwen3-1.7B                       qwen3        28  8 128  16  2048  6144 151936 yes    - -  40960
qwen3-4b          Qwen/Qwen3-4B                         qwen3        36  8 128  32  2560  9728 151936 yes    - -  40960
qwen3-8b          Qwen/Qwen3-8B                         qwen3        36  8 128  32  4096 12288 151936  no    - -  40960
qwen3-14b         Qwen/Qwen3-14B                        qwen3        40  8 128  40  5120 17408 151936  no    - -  40960
qwen3-32b         Qwen/Qwen3-32B                        qwen3        64  8 128  64  5120 25600 151936  no    - -  40960
gemma-3-270m      google/gemma-3-270m                   gemma3_text  18  1 256   4   640  2048 262144 yes  512 6  32768
gemma-3-1b        google/gemma-3-1b-pt                  gemma3_text  26  1 256   4  1152  6912 262144 yes  512 6  32768
gemma-3-4b        google/gemma-3-4b-pt                  gemma3_text  34  4 256   8  2560 10240 262208 yes 1024 6 131072
gemma-3-12b       google/gemma-3-12b-pt                 gemma3_text  48  8 256  16  3840 15360 262208 yes 1024 6 131072
gemma-3-27b       google/gemma-3-27b-pt                 gemma3_text  62 16 128  32  5376 21504 262208 yes 1024 6 131072
mistral-7b-v0.1   mistralai/Mistral-7B-v0.1             mistral      32  8 128  32  4096 14336  32000  no 4096 -  32768
mistral-7b-v0.3   mistralai/Mistral-7B-v0.3             mistral      32  8 128  32  4096 14336  32768  no    - -  32768
mistral-nemo-12b  mistralai/Mistral-Nemo-Base-2407      mistral      40  8 128  32  5120 14336 131072  no    - - 128000
mistral-small-24b mistralai/Mistral-Small-24B-Base-2501 mistral      40  8 128  32  5120 32768 131072  no    - -  32768
"""


# The columns are the fields of `KnownLatent`.
LATENTS = """
deepseek-v2-lite  deepseek-ai/DeepSeek-V2-Lite          deepseek_v2   27  16 512 64   0   15706484224 163840
deepseek-v3       deepseek-ai/DeepSeek-V3               deepseek_v3   61 128 512 64   0  671026404352 163840
deepseek-v3.2     deepseek-ai/DeepSeek-V3.2             deepseek_v32  61 128 512 64 128  671877929216 163840
glm-4.7-flash     zai-org/GLM-4.7-Flash                 glm4_moe_lite 47  20 512 64   0   29943390976 202752
glm-5             zai-org/GLM-5                         glm_moe_dsa   78  64 512 64 128  743911199232 202752
kimi-k2           moonshotai/Kimi-K2-Instruct           deepseek_v3   61  64 512 64   0 1026408209408 131072
minicpm3-4b       openbmb/MiniCPM3-4B                   minicpm3      62  40 256 32   0    4073875968  32768
"""


def _read_latent(line: str) -> KnownLatent:
    name, hub, kind, *figures = line.split()
    return KnownLatent(name, hub, kind, *map(int, figures))


def _read(line: str) -> KnownModel:
    name, hub, kind, *sizes, tied, window, every, reads = line.split()
    layers, kv_heads, head_dim, query_heads, hidden, mlp, vocabulary = map(int, sizes)
    spans = [None if text == "-" else int(text) for text in (window, every)]
    figures = (layers, kv_heads, head_dim, query_heads, hidden, mlp, vocabulary)
    return KnownModel(name, hub, kind, *figures, tied == "yes", spans[0], spans[1], int(reads))


MODELS = {model.name: model for model in map(_read, TABLE.strip().splitlines())}
LATENT_MODELS = {model.name: model for model in map(_read_latent, LATENTS.strip().splitlines())}


def find(name: str) -> KnownModel | KnownLatent | None:
    """Return the model with this name or Hub id, ignoring case."""
    wanted = name.strip().lower()
    every: list[KnownModel | KnownLatent] = [*MODELS.values(), *LATENT_MODELS.values()]
    return next((model for model in every if wanted in (model.name, model.hub.lower())), None)


def names() -> list[str]:
    """Return the names that `tersekv estimate` knows without a file, KVQuant's models included."""
    return [*MODELS, *LATENT_MODELS, *(name.lower() for name in KNOWN)]


def near(name: str) -> list[str]:
    """Return up to three similar names, best first.

    These are known names that the name, or the last part of a Hub id, begins with; then similar
    spellings.
    """
    wanted = name.strip().lower().rpartition("/")[2]
    begun = sorted((known for known in names() if wanted.startswith(known)), key=len, reverse=True)
    return list(dict.fromkeys([*begun, *difflib.get_close_matches(wanted, names(), n=3, cutoff=0.7)]))[:3]
