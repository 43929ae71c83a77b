#!/usr/bin/env python3
"""Kimi K3 in float64 NumPy: the ground truth that the C program is checked against.

It is written from the project's model description alone and follows its formulas in their order.
Clarity comes before speed: one token at a time, K and V expanded per head for every cached position
(not the absorbed form), a two-pass softmax, the KDA recurrence term by term. Weights are dequantised
to float64 exactly; of the expert tensors only the experts that a token selects are read.

    reference.py MODEL.h5 --prompt 1,2,3 --steps 8 --output ref.npz
    reference.py MODEL.h5 --compare RUN.h5 [--tolerance 1e-5] [--break NAME]

Exit status: 0 done, 1 the comparison failed, 2 wrong usage, 3 bad input.

A check that has never failed has not been shown to work: `broken=NAME` (--break NAME) plants one wrong
term out of BREAKAGES, each a mistake that would still emit fluent text.
"""
import argparse
import sys

import h5py
import numpy as np

BREAKAGES = (
    # the layer and the attention residual
    ("restart_rule", "a restart does not reset the residual stream: p = p + a everywhere"),
    ("bank_holds_h", "the bank stores the mixed h instead of the raw layer input p"),
    ("residual_normalised", "the attention residual sums the normalised vectors"),
    ("residual_scores_raw", "the attention residual scores the raw vectors"),
    ("residual_skipped", "h = p: no attention residual"),
    # KDA
    ("conv_tap_order", "the current token meets the first convolution tap"),
    ("silu_before_conv", "silu before the convolution instead of after it"),
    ("no_qk_norm", "q and k are not divided by their lengths"),
    ("q_unscaled", "q without D^-1/2 (seen only through the epsilon of o_norm)"),
    ("no_dt_bias", "the decay without dt_bias"),
    ("no_a_log", "the decay without the factor exp(A_log)"),
    ("softplus_decay", "g = -exp(A_log) softplus(.), the older family's rule, without the lower bound"),
    ("decay_axis", "the decay runs along the value channel j instead of the key channel i"),
    ("decay_after_read", "r is read from the state before its decay"),
    ("no_beta", "beta = 1"),
    ("no_delta", "plain linear attention: nothing is subtracted from v"),
    ("kda_state_transposed", "o[i] = sum_j S[i,j] q[j]"),
    ("no_o_norm", "no norm per head before the gate"),
    ("no_gate_kda", "KDA without its output gate"),
    # gated MLA
    ("eps_swapped", "q_a_norm and kv_a_norm use rms_norm_eps"),
    ("rope_dims_dropped", "the score without q_rope . r"),
    ("rope_applied", "a rotary embedding turns the rope dims"),
    ("no_score_scale", "scores not divided by sqrt(nope + rope)"),
    ("kv_rows_swapped", "kv_b_proj read as v rows then nope rows"),
    ("no_gate_mla", "MLA without its output gate"),
    # FFN
    ("no_up_tanh", "u instead of lambda tanh(u / lambda)"),
    ("no_gate_tanh", "silu(g) instead of beta tanh(g / beta) sigmoid(g)"),
    ("bias_weighs", "router_bias enters the expert weight too"),
    ("no_bias", "the selection ignores router_bias"),
    ("tie_to_higher", "a tie goes to the higher expert index (needs a model with exact ties)"),
    ("no_renormalize", "weights are not divided by their sum (seen only through routed_norm's epsilon)"),
    ("latent_norm_missing", "no routed_norm"),
    ("latent_norm_before_sum", "routed_norm on each expert's output, then the sum"),
    ("shared_missing", "no shared experts"),
)
BREAKAGE_NAMES = tuple(name for name, _ in BREAKAGES)

CONFIG_FIELDS = (
    "num_layers hidden_size vocab_size num_heads q_lora_rank kv_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim kda_head_dim kda_conv_kernel kda_gate_lower_bound num_experts "
    "num_experts_per_token num_shared_experts latent_size moe_intermediate_size dense_intermediate_size "
    "first_dense_layers attn_res_block_size rms_norm_eps low_rank_norm_eps situ_beta situ_linear_beta "
    "routed_scaling_factor renormalize max_context").split()


class BadInput(Exception):
    """A file or an argument that does not keep the contract."""


# ---------------------------------------------------------------- the model file

E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])


def dequantise_bf16(raw):
    """uint16 [...] -> float64 [...]: a bf16 is the upper half of a float32."""
    return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def dequantise_q8_0(raw):
    """uint8 [..., blocks * 34] -> float64 [..., blocks * 32]: float16 d, then 32 int8; w = d q."""
    block = np.ascontiguousarray(raw).reshape(*raw.shape[:-1], -1, 34)
    d = np.ascontiguousarray(block[..., :2]).view("<f2").astype(np.float64)        # [..., blocks, 1]
    q = np.ascontiguousarray(block[..., 2:]).view(np.int8).astype(np.float64)      # [..., blocks, 32]
    return (d * q).reshape(*raw.shape[:-1], -1)


def dequantise_mxfp4(raw):
    """uint8 [..., blocks * 17] -> float64 [..., blocks * 32]: an E8M0 byte, then 16 bytes of nibbles."""
    block = np.ascontiguousarray(raw).reshape(*raw.shape[:-1], -1, 17)
    scale, packed = block[..., :1].astype(np.int64), block[..., 1:]
    if (scale == 255).any():
        raise BadInput("mxfp4 block with scale byte 255 (NaN)")
    codes = np.stack([packed & 15, packed >> 4], axis=-1)           # the low nibble is the even element
    values = E2M1[codes].reshape(*packed.shape[:-1], 32)
    return np.ldexp(values, scale - 127).reshape(*raw.shape[:-1], -1)


QUANTISED = {"q8_0": (32, 34, dequantise_q8_0), "mxfp4": (32, 17, dequantise_mxfp4)}

# The GGUF formats, where the public package is there: its decoding is their definition.
try:
    import gguf.quants
except ImportError:
    gguf = None
for name in ("Q4_0 Q4_1 Q5_0 Q5_1 IQ4_NL Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_XS".split()
             if gguf else ()):
    kind = gguf.GGMLQuantizationType[name]
    QUANTISED[name.lower()] = (*gguf.GGML_QUANT_SIZES[kind], lambda raw, kind=kind: gguf.quants.dequantize(
        np.ascontiguousarray(raw), kind).astype(np.float64))


def text(value):
    """A text attribute of fixed or variable length as str."""
    value = np.asarray(value).item()
    return value.decode() if isinstance(value, bytes) else str(value)


class ModelFile:
    """The tensors of a model file as float64, checked for shape, kept once read."""

    def __init__(self, path):
        try:
            self.file = h5py.File(path, "r")
        except OSError as error:
            raise BadInput(f"{path}: {error}") from None
        wanted = {"format": "k3decode-model", "format_version": 1, "architecture": "kimi-k3"}
        for name, want in wanted.items():
            if name not in self.file.attrs:
                raise BadInput(f"{path}: no root attribute {name}")
            got = self.file.attrs[name]
            got = text(got) if isinstance(want, str) else int(got)
            if got != want:
                raise BadInput(f"{path}: {name} is {got!r}, wanted {want!r}")
        self.path, self.kept = path, {}

    def config(self):
        group = self.file.get("config")
        if group is None:
            raise BadInput(f"{self.path}: no group /config")
        config = {}
        for name in CONFIG_FIELDS:
            if name not in group.attrs:
                raise BadInput(f"{self.path}: /config has no field {name}")
            config[name] = np.asarray(group.attrs[name]).item()
        if "layer_types" not in group:
            raise BadInput(f"{self.path}: /config has no dataset layer_types")
        config["layer_types"] = group["layer_types"][...].tolist()
        if len(config["layer_types"]) != config["num_layers"] or not set(config["layer_types"]) <= {0, 1}:
            raise BadInput(f"{self.path}: layer_types must be {config['num_layers']} values 0 or 1")
        return config

    def tensor(self, name, *shape, at=None):
        """The tensor `name`, whose logical shape must be `shape`; `at` picks one index of its first axis."""
        if (name, at) not in self.kept:
            self.kept[name, at] = self.read(name, shape, at)
        return self.kept[name, at]

    def read(self, name, shape, at):
        if name not in self.file:
            raise BadInput(f"{self.path}: no tensor /{name}")
        data = self.file[name]
        kind = text(data.attrs["type"]) if "type" in data.attrs else "f32"
        where = f"{self.path}: /{name} ({kind})"
        if kind in QUANTISED:
            block, size, dequantise = QUANTISED[kind]
            if "shape" not in data.attrs:
                raise BadInput(f"{where}: no attribute shape")
            logical = tuple(int(n) for n in data.attrs["shape"])
            if logical[-1] % block:
                raise BadInput(f"{where}: a row of {logical[-1]} is not a whole number of blocks of {block}")
            stored, dtype = logical[:-1] + (logical[-1] // block * size,), np.uint8
        elif kind in ("f32", "bf16", "f16"):
            logical = stored = data.shape
            dtype = np.float32 if kind == "f32" else np.uint16
            dequantise = {"f32": np.float64, "bf16": dequantise_bf16, "f16": lambda raw: raw.view("<f2").astype(np.float64)}[kind]
        else:
            raise BadInput(f"{where}: a type that this reference does not read")
        if data.dtype != dtype:
            raise BadInput(f"{where}: stored as {data.dtype}, wanted {np.dtype(dtype)}")
        if logical != shape or data.shape != stored:
            raise BadInput(f"{where}: shape {logical} stored as {data.shape}, wanted {shape}")
        return dequantise(data[...] if at is None else data[at])


# ---------------------------------------------------------------- small functions of the formulas

def rms(x, w, eps):
    """w x / sqrt(mean(x^2) + eps), the mean over the last axis."""
    return w * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def sigmoid(x):
    small = np.exp(-np.abs(x))                  # never overflows, and keeps relative precision at both ends
    return np.where(x >= 0, 1, small) / (1 + small)


def silu(x):
    return x * sigmoid(x)


def softmax(x):
    """Two passes over the last axis: the maximum, then the sum."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def rotate(x, position):
    """A rotary embedding over the last axis. The model has none: this serves a breakage alone."""
    half = x.shape[-1] // 2
    angle = position * 10000.0 ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], -1)


# ---------------------------------------------------------------- the model, one token at a time

class Decoder:
    """One sequence: its KDA states, convolution windows and MLA keys and values, all empty at first."""

    def __init__(self, model, broken=None):
        if broken is not None and broken not in BREAKAGE_NAMES:
            raise BadInput(f"unknown breakage {broken!r}; known: {', '.join(BREAKAGE_NAMES)}")
        self.model, self.config, self.broken = model, model.config, broken
        c = self.config
        heads, D = c["num_heads"], c["kda_head_dim"]
        qk, v = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["v_head_dim"]
        self.position = 0
        self.route_margin = np.inf              # the smallest gap between the last chosen and first refused expert
        self.state, self.window, self.keys, self.values = {}, {}, {}, {}
        for i, is_mla in enumerate(c["layer_types"]):
            if is_mla:
                self.keys[i], self.values[i] = np.zeros((0, heads, qk)), np.zeros((0, heads, v))
            else:
                self.state[i] = np.zeros((heads, D, D))                               # [head, i (key), j (value)]
                for n in "qkv":
                    self.window[i, n] = np.zeros((c["kda_conv_kernel"], heads * D))   # oldest first

    def tensor(self, layer, name, *shape, at=None):
        return self.model.tensor(name if layer is None else f"layers/{layer:03d}/{name}", *shape, at=at)

    def step(self, token):
        """Feed one token; the logits [V] that follow it."""
        c, H, V, eps = self.config, self.config["hidden_size"], self.config["vocab_size"], self.config["rms_norm_eps"]
        if not 0 <= token < V:
            raise BadInput(f"token {token} is not in 0 .. {V - 1}")
        if self.position >= c["max_context"]:
            raise BadInput(f"position {self.position} is beyond max_context {c['max_context']}")
        p = self.tensor(None, "embed", V, H, at=int(token))
        bank = []
        for i in range(c["num_layers"]):
            h = self.attn_res(bank, p, i, "attn_res")
            restart = i % c["attn_res_block_size"] == 0
            if restart:
                bank.append(h if self.broken == "bank_holds_h" else p)
            attention = self.mla if c["layer_types"][i] else self.kda
            a = attention(i, rms(h, self.tensor(i, "input_norm", H), eps))
            p = a if restart and self.broken != "restart_rule" else p + a
            h = self.attn_res(bank, p, i, "mlp_res")
            ffn = self.dense if i < c["first_dense_layers"] else self.moe
            p = p + ffn(i, rms(h, self.tensor(i, "post_attn_norm", H), eps))
        h = self.attn_res(bank, p, None, "output_res")
        self.position += 1
        return self.tensor(None, "lm_head", V, H) @ rms(h, self.tensor(None, "final_norm", H), eps)

    def attn_res(self, bank, p, layer, name):
        """Mix the banked vectors and p by a softmax: scores of the normalised vectors, sum of the raw ones."""
        H, eps = self.config["hidden_size"], self.config["rms_norm_eps"]
        w, u = self.tensor(layer, name + "_norm", H), self.tensor(layer, name + "_proj", H)
        if not bank or self.broken == "residual_skipped":
            return p
        raw = np.stack(bank + [p])                                  # [n + 1, H]
        normed = rms(raw, w, eps)
        score = (raw * w if self.broken == "residual_scores_raw" else normed) @ u
        return softmax(score) @ (normed if self.broken == "residual_normalised" else raw)

    def conv(self, layer, n, x):
        """silu(causal_conv(W x)), depthwise; the current token meets the last tap."""
        c = self.config
        wide, kernel = c["num_heads"] * c["kda_head_dim"], c["kda_conv_kernel"]
        new = self.tensor(layer, n + "_proj", wide, c["hidden_size"]) @ x
        if self.broken == "silu_before_conv":
            new = silu(new)
        window = np.vstack([self.window[layer, n][1:], new])        # [kernel, heads D], oldest first
        self.window[layer, n] = window
        taps = self.tensor(layer, n + "_conv", wide, kernel)
        if self.broken == "conv_tap_order":
            taps = taps[:, ::-1]
        y = np.einsum("ct,tc->c", taps, window)
        return y if self.broken == "silu_before_conv" else silu(y)

    def kda(self, layer, x):
        c, broken = self.config, self.broken
        heads, D, H = c["num_heads"], c["kda_head_dim"], c["hidden_size"]
        q, k, v = (self.conv(layer, n, x).reshape(heads, D) for n in "qkv")
        if broken != "no_qk_norm":
            q = q / np.sqrt(np.sum(q * q, axis=1, keepdims=True) + 1e-6)
            k = k / np.sqrt(np.sum(k * k, axis=1, keepdims=True) + 1e-6)
        if broken != "q_unscaled":
            q = q * D ** -0.5

        # g: the log decay of each key channel, between lower_bound and 0
        f = self.tensor(layer, "f_b_proj", heads * D, D) @ (self.tensor(layer, "f_a_proj", D, H) @ x)
        dt_bias = self.tensor(layer, "dt_bias", heads * D)
        f = (f if broken == "no_dt_bias" else f + dt_bias).reshape(heads, D)
        rate = np.exp(self.tensor(layer, "A_log", heads))[:, None]
        if broken == "no_a_log":
            rate = 1.0
        g = c["kda_gate_lower_bound"] * sigmoid(rate * f)
        if broken == "softplus_decay":
            g = -rate * np.logaddexp(0, f)
        beta = sigmoid(self.tensor(layer, "b_proj", heads, H) @ x)[:, None]
        if broken == "no_beta":
            beta = np.ones_like(beta)

        # the delta rule: forget, read what k recalls, write the correction
        S = self.state[layer]
        before = np.einsum("hij,hi->hj", S, k)
        S = S * (np.exp(g)[:, None, :] if broken == "decay_axis" else np.exp(g)[:, :, None])
        r = before if broken == "decay_after_read" else np.einsum("hij,hi->hj", S, k)
        if broken == "no_delta":
            r = np.zeros_like(r)
        S = S + k[:, :, None] * (beta * (v - r))[:, None, :]
        self.state[layer] = S
        o = np.einsum("hij,hj->hi" if broken == "kda_state_transposed" else "hij,hi->hj", S, q)

        if broken != "no_o_norm":
            o = rms(o, self.tensor(layer, "o_norm", D), c["rms_norm_eps"])
        o = o.reshape(heads * D)
        if broken != "no_gate_kda":
            o = o * sigmoid(self.tensor(layer, "g_proj", heads * D, H) @ x)
        return self.tensor(layer, "o_proj", H, heads * D) @ o

    def mla(self, layer, x):
        c, broken = self.config, self.broken
        heads, H, Q, C = c["num_heads"], c["hidden_size"], c["q_lora_rank"], c["kv_lora_rank"]
        nope, R, V = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        eps = c["rms_norm_eps" if broken == "eps_swapped" else "low_rank_norm_eps"]
        q_low = rms(self.tensor(layer, "q_a_proj", Q, H) @ x, self.tensor(layer, "q_a_norm", Q), eps)
        q = (self.tensor(layer, "q_b_proj", heads * (nope + R), Q) @ q_low).reshape(heads, nope + R)
        latent, r = np.split(self.tensor(layer, "kv_a_proj", C + R, H) @ x, [C])
        latent = rms(latent, self.tensor(layer, "kv_a_norm", C), eps)
        if broken == "rope_applied":
            q = np.hstack([q[:, :nope], rotate(q[:, nope:], self.position)])
            r = rotate(r, self.position)

        # Expanded form: this position's K [heads, nope + R] and V [heads, v] join those before it.
        kv = (self.tensor(layer, "kv_b_proj", heads * (nope + V), C) @ latent).reshape(heads, nope + V)
        k_new, v_new = kv[:, :nope], kv[:, nope:]
        if broken == "kv_rows_swapped":
            v_new, k_new = kv[:, :V], kv[:, V:]
        k_new = np.hstack([k_new, np.tile(r, (heads, 1))])          # r is shared by all heads
        K = self.keys[layer] = np.concatenate([self.keys[layer], k_new[None]])
        values = self.values[layer] = np.concatenate([self.values[layer], v_new[None]])

        if broken == "rope_dims_dropped":
            q = np.hstack([q[:, :nope], np.zeros((heads, R))])
        score = np.einsum("hd,thd->ht", q, K)
        if broken != "no_score_scale":
            score = score / np.sqrt(nope + R)
        o = np.einsum("ht,thv->hv", softmax(score), values).reshape(heads * V)
        if broken != "no_gate_mla":
            o = o * sigmoid(self.tensor(layer, "g_proj", heads * V, H) @ x)
        return self.tensor(layer, "o_proj", H, heads * V) @ o

    def situ(self, g, u):
        beta, lam = self.config["situ_beta"], self.config["situ_linear_beta"]
        gate = silu(g) if self.broken == "no_gate_tanh" else beta * np.tanh(g / beta) * sigmoid(g)
        return gate * (u if self.broken == "no_up_tanh" else lam * np.tanh(u / lam))

    def gated(self, layer, prefix, wide, x):
        """W_down situ(W_gate x, W_up x) with `wide` intermediate values."""
        H = self.config["hidden_size"]
        gate, up = (self.tensor(layer, f"{prefix}{n}_proj", wide, H) @ x for n in ("gate", "up"))
        return self.tensor(layer, f"{prefix}down_proj", H, wide) @ self.situ(gate, up)

    def dense(self, layer, x):
        return self.gated(layer, "", self.config["dense_intermediate_size"], x)

    def route(self, layer, x):
        """The chosen experts and their weights. The bias selects; it does not weigh."""
        c, broken = self.config, self.broken
        E, top = c["num_experts"], c["num_experts_per_token"]
        s = sigmoid(self.tensor(layer, "router", E, c["hidden_size"]) @ x)
        biased = s + self.tensor(layer, "router_bias", E)
        key = s if broken == "no_bias" else biased
        if broken == "tie_to_higher":
            order = E - 1 - np.argsort(-key[::-1], kind="stable")
        else:
            order = np.argsort(-key, kind="stable")                 # stable: a tie keeps the lower index first
        if top < E:
            self.route_margin = min(self.route_margin, key[order[top - 1]] - key[order[top]])
        chosen = order[:top]
        w = (biased if broken == "bias_weighs" else s)[chosen]
        if c["renormalize"] and broken != "no_renormalize":
            w = w / (w.sum() + 1e-20)
        return chosen, w * c["routed_scaling_factor"]

    def moe(self, layer, x):
        c, broken = self.config, self.broken
        E, H, L, wide = c["num_experts"], c["hidden_size"], c["latent_size"], c["moe_intermediate_size"]
        chosen, weights = self.route(layer, x)
        norm = self.tensor(layer, "routed_norm", L)
        y = self.tensor(layer, "routed_down_proj", L, H) @ x
        z = np.zeros(L)
        for e, w in zip(chosen.tolist(), weights):
            gate = self.tensor(layer, "experts_gate", E, wide, L, at=e) @ y
            up = self.tensor(layer, "experts_up", E, wide, L, at=e) @ y
            out = w * (self.tensor(layer, "experts_down", E, L, wide, at=e) @ self.situ(gate, up))
            z = z + (rms(out, norm, c["rms_norm_eps"]) if broken == "latent_norm_before_sum" else out)
        if broken not in ("latent_norm_missing", "latent_norm_before_sum"):
            z = rms(z, norm, c["rms_norm_eps"])                     # after the sum over experts
        out = self.tensor(layer, "routed_up_proj", H, L) @ z
        if c["num_shared_experts"] and broken != "shared_missing":
            out = out + self.gated(layer, "shared_", c["num_shared_experts"] * wide, x)
        return out


class Model:
    def __init__(self, path):
        self.file = ModelFile(path)
        self.config = self.file.config()
        self.tensor = self.file.tensor
        self.route_margin = np.inf              # of the latest logits() or greedy(): how near routing was to a flip

    def logits(self, token_ids, broken=None):
        """float64 [n, V]: row t holds the logits after token t."""
        decoder = Decoder(self, broken)
        rows = [decoder.step(int(token)) for token in token_ids]
        self.route_margin = decoder.route_margin
        return np.array(rows).reshape(len(rows), self.config["vocab_size"])

    def greedy(self, prompt, steps, broken=None):
        """(token_ids [steps], logits [steps, V]): row n chose token n (a tie goes to the lower index)."""
        if len(prompt) == 0:
            raise BadInput("the prompt is empty")
        decoder = Decoder(self, broken)
        for token in prompt[:-1]:
            decoder.step(int(token))
        tokens, rows, token = [], [], int(prompt[-1])
        for _ in range(steps):
            rows.append(decoder.step(token))
            token = int(np.argmax(rows[-1]))
            tokens.append(token)
        self.route_margin = decoder.route_margin
        return np.array(tokens, np.int64), np.array(rows).reshape(steps, self.config["vocab_size"])


def load(path):
    return Model(path)


# ---------------------------------------------------------------- comparison and command line

def measure(want, got):
    """How far the logits `got` [n, V] are from `want`: a dictionary of measures."""
    want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
    error = got - want
    log_p, log_q = (x - x.max(1, keepdims=True) for x in (want, got))
    log_p, log_q = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (log_p, log_q))
    return {"relative_l2": np.linalg.norm(error) / np.linalg.norm(want),
            "max_abs_error": np.abs(error).max(),
            "mean_kl": (np.exp(log_p) * (log_p - log_q)).sum(1).mean(),
            "top1_agreement": (want.argmax(1) == got.argmax(1)).mean()}


def compare(model, run_path, broken=None):
    """Feed a run's own tokens to the reference; the measures of its logits."""
    try:
        with h5py.File(run_path, "r") as run:
            missing = [n for n in ("prompt/token_ids", "decode/token_ids", "decode/logits") if n not in run]
            if missing:
                raise BadInput(f"{run_path}: no dataset /{missing[0]}")
            prompt, tokens = run["prompt/token_ids"][...], run["decode/token_ids"][...]
            got = run["decode/logits"][...]
    except OSError as error:
        raise BadInput(f"{run_path}: {error}") from None
    n, V = len(tokens), model.config["vocab_size"]
    if n == 0 or len(prompt) == 0 or got.shape != (n, V):
        raise BadInput(f"{run_path}: {len(prompt)} prompt tokens, {n} decoded, logits {got.shape}, wanted {(n, V)}")
    # Row 0 follows the last prompt token, and the last decoded token is never fed.
    want = model.logits(np.concatenate([prompt, tokens[:-1]]), broken)[len(prompt) - 1:]
    return measure(want, got)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Kimi K3 in float64 NumPy, the ground truth of k3decode",
                                     epilog="breakages: " + "; ".join(f"{n}: {m}" for n, m in BREAKAGES))
    parser.add_argument("model")
    parser.add_argument("--prompt", help="token ids, comma-separated")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--output", help="write prompt, token_ids, logits to this .npz")
    parser.add_argument("--compare", metavar="RUN.h5", help="compare with a run file, teacher forced")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative L2 (default 1e-5)")
    parser.add_argument("--break", dest="broken", metavar="NAME", choices=BREAKAGE_NAMES, help="plant one wrong term")
    options = parser.parse_args(arguments)
    if (options.prompt is None) == (options.compare is None):
        parser.error("give either --prompt or --compare")
    if options.compare and options.output:
        parser.error("--output goes with --prompt")
    if options.steps < 0:
        parser.error("--steps must not be negative")
    try:
        prompt = [int(t) for t in options.prompt.split(",")] if options.compare is None else None
    except ValueError:
        parser.error(f"--prompt: {options.prompt!r} is not a list of token ids")
    try:
        model = load(options.model)
        if options.compare is None:
            tokens, logits = model.greedy(prompt, options.steps, options.broken)
            print("token_ids", ",".join(map(str, tokens)))
            if options.output:
                np.savez(options.output, prompt=np.array(prompt), token_ids=tokens, logits=logits)
            return 0
        measures = compare(model, options.compare, options.broken)
    except BadInput as error:
        print(f"reference.py: {error}", file=sys.stderr)
        return 3
    for name, value in measures.items():
        print(f"{name:16} {value:.6g}")
    print(f"{'route_margin':16} {model.route_margin:.6g}   # a gap near float32 rounding may flip an expert")
    good = measures["relative_l2"] <= options.tolerance             # NaN is not good
    print(f"{'verdict':16} {'ok' if good else 'FAILED'} (relative L2, tolerance {options.tolerance:g})")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
