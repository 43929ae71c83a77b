"""Text in, text out: `k3decode text`, `run --prompt-text`, `info --text`, on a tokenizer of Kimi's form made here."""
import base64
import json
import os
import re
import subprocess
import sys

import h5py
import pytest

from harness import K3DECODE, k3, needs_mpirun, refused

pytest.importorskip("tiktoken", reason="needs tiktoken (pip install tiktoken)")
ENV = {"K3_PYTHON": sys.executable}
WORDS = ["he", "ll", "hell", "hello", " w", "or", " wor", " world"]
MODEL = "synth:tiny:num_layers=4,vocab_size=520"        # as many as the tokenizer below: 264 ranks and 256 special tokens


def make(folder, words=WORDS, special=None, pattern=None):
    """A tokenizer: the 256 bytes, then `words`; special tokens by id."""
    folder.mkdir(exist_ok=True)
    ranks = [bytes([byte]) for byte in range(256)] + [word.encode() for word in words]
    (folder / "tiktoken.model").write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks)))
    if special:
        (folder / "tokenizer_config.json").write_text(json.dumps(
            {"added_tokens_decoder": {str(identifier): {"content": name, "special": True} for identifier, name in special.items()}}))
    if pattern is not None:
        (folder / "tokenization_kimi.py").write_text(f"class Tokenizer:\n    pat_str = {pattern}\n")
    return folder


@pytest.fixture
def tokenizer(tmp_path):
    return make(tmp_path / "tokenizer", special={264: "[BOS]", 270: "<|im_end|>"})


def encode(tokenizer, text):
    out = k3("text", "encode", "--tokenizer", tokenizer, "--", text, env=ENV).out
    return [int(word) for word in out.strip().split(",") if word]


def decode(tokenizer, ids):
    return k3("text", "decode", "--tokenizer", tokenizer, ",".join(map(str, ids)), env=ENV).out.removesuffix("\n")


# ---------------------------------------------------------------- encode and decode

def test_ids_are_those_of_the_ranks(tokenizer):
    assert encode(tokenizer, "hello world") == [259, 263]
    assert encode(tokenizer, "hell w") == [258, 260]
    assert encode(tokenizer, "a") == [ord("a")]
    assert encode(tokenizer, "") == []


@pytest.mark.parametrize("text", ["hello world", "It's 12345 tokens, isn't it?\n\n  Yes.", "你好，世界 hello", "żółć 🙂 \t x", "--help", "a\r\nb"])
def test_text_survives_the_round_trip(tokenizer, text):
    ids = encode(tokenizer, text)
    assert decode(tokenizer, ids) == text
    assert b"".join(bytes([i]) if i < 256 else WORDS[i - 256].encode() for i in ids).decode() == text


def test_half_a_character_or_a_nul_does_not_hide_the_rest(tokenizer):
    half = "é".encode()[0]
    assert decode(tokenizer, [half, ord("a"), 0, ord("b")]) == "\ufffda\ufffdb"


def test_special_tokens_have_their_own_ids(tokenizer):
    assert encode(tokenizer, "[BOS]hello<|im_end|>") == [264, 259, 270]
    assert encode(tokenizer, "<|reserved_token_265|>") == [265]
    assert decode(tokenizer, [264, 259, 270, 519]) == "[BOS]hello<|im_end|><|reserved_token_519|>"


def test_pattern_of_kimi_cuts_as_it_should(tmp_path):
    """Each piece is a token of its own, and no other merge exists: a wrong cut would give single bytes."""
    pieces = ["Hello", ",", " world's", " ", "123", "45", " ", "你好", "\n\n", " Camel", "Case", "ABC", "!?\n", " été"]
    words = [piece for piece in dict.fromkeys(pieces) if len(piece.encode()) > 1]
    folder, text = make(tmp_path / "kimi", words=words), "".join(pieces)
    ids = encode(folder, text)
    assert [chr(i) if i < 256 else words[i - 256] for i in ids] == pieces
    other = make(tmp_path / "other", words=words, pattern=r"'\\s+|\\S+'")       # control: another pattern cuts otherwise
    assert encode(other, text) != ids and decode(other, encode(other, text)) == text


def test_pattern_of_the_checkpoint_is_used(tmp_path):
    words = ["ab", "cd", "abcd"]
    plain = make(tmp_path / "plain", words=words)
    pairs = make(tmp_path / "pairs", words=words, pattern='"|".join([r"""..""", r"""."""])')
    assert encode(plain, "abcd") == [258]
    assert encode(pairs, "abcd") == [256, 257]


def test_standard_input_serves_too(tokenizer):
    def pipe(direction, text):
        return subprocess.run([K3DECODE, "text", direction, "--tokenizer", tokenizer, "-"], input=text.encode(), capture_output=True,
                              env={**os.environ, **ENV}, timeout=60, check=True).stdout.decode()
    assert pipe("decode", pipe("encode", "hello world\n")) == "hello world\n\n"
    long = "hello world " * 20000                       # longer than a pipe holds
    assert pipe("encode", long).count(",") > 20000


# ---------------------------------------------------------------- run and info

def test_run_takes_and_prints_text(tokenizer, tmp_path):
    path = tmp_path / "run.h5"
    by_text = k3("run", MODEL, "--backend", "host", "--prompt-text", "hello world", "--tokenizer", tokenizer, "--steps", 5, "--output", path,
                 env=ENV).out
    with h5py.File(path) as run:
        tokens = run["decode/token_ids"][:].tolist()
        assert run["prompt/token_ids"][:].tolist() == [259, 263]
    by_ids = k3("run", MODEL, "--backend", "host", "--prompt", "259,263", "--steps", 5).out
    assert by_ids.splitlines()[0] == by_text.splitlines()[0] and "text:" not in by_ids
    assert f"text: {decode(tokenizer, tokens)}\n" in by_text
    page = k3("info", "--text", "--tokenizer", tokenizer, path, env=ENV).out
    assert "\nprompt text\nhello world\n" in page and page.endswith(f"\ndecoded text\n{decode(tokenizer, tokens)}\n")


@needs_mpirun
def test_every_rank_gets_the_prompt(tokenizer, tmp_path):
    words = ("run", MODEL, "--backend", "host", "--steps", 4, "--output", tmp_path / "run.h5", "--overwrite")
    one = k3(*words, "--prompt", "259,263").out.splitlines()[0]
    three = k3(*words, "--prompt-text", "hello world", "--tokenizer", tokenizer, ranks=3, env=ENV).out
    assert one in three.splitlines() and three.count("text: ") == 1


def test_text_that_the_tokenizer_lacks_keeps_the_run(tmp_path):
    """More tokens in the model than in the tokenizer: the run file is whole, the exit status says what is missing."""
    folder = make(tmp_path / "tokenizer")
    path = tmp_path / "run.h5"
    result = refused("run", "synth:tiny:num_layers=4,vocab_size=100000", "--backend", "host", "--prompt", 1, "--steps", 8, "--tokenizer",
                     folder, "--output", path, env=ENV, phrases=["none of the tokenizer's"])
    assert "done: 8 tokens" in result.out
    with h5py.File(path) as run:
        assert int(run["decode/steps"][()]) == 8


# ---------------------------------------------------------------- refusals

def test_bad_tokenizers_are_refused(tmp_path):
    def try_it(folder, *phrases):
        refused("text", "encode", "--tokenizer", folder, "x", env=ENV, phrases=phrases)
    try_it(tmp_path / "absent", "tiktoken.model cannot be read")
    folder = make(tmp_path / "bad")
    good = (folder / "tiktoken.model").read_bytes()
    for content, phrase in ((good + b"!!! 264\n", "line 265"), (good + b"YWE= 999\n", "are not 0 to"), (good + b"YWE= x\n", "line 265"),
                            (b"\n".join(good.splitlines()[1:]), "are not 0 to"), (b"YWE= 0\n", "single byte 0"), (b"", "single byte 0")):
        (folder / "tiktoken.model").write_bytes(content)
        try_it(folder, phrase)
    (folder / "tiktoken.model").write_bytes(good)
    (folder / "tokenizer_config.json").write_text("{")
    try_it(folder, "tokenizer_config.json cannot be read")
    (folder / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"3": {"content": "[BOS]"}}}')
    try_it(folder, "special token 3 lies among")
    for identifier, content in ((300, '""'), (300, "5"), (2**70, '"[BOS]"')):
        (folder / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"%d": {"content": %s}}}' % (identifier, content))
        try_it(folder, f"special token {identifier} is ")
    (folder / "tokenizer_config.json").write_text("[" * 100_000)
    try_it(folder, "tokenizer_config.json cannot be read")
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenization_kimi.py").write_text("pat_str = make()\n")
    try_it(folder, "no pat_str that can be read")
    (folder / "tokenization_kimi.py").write_text("pat_str = '('\n")
    try_it(folder, "cannot be built")
    (folder / "tokenization_kimi.py").write_text("pat_str = 'x*'\n")
    try_it(folder, "matches the empty text")
    (folder / "tokenization_kimi.py").write_text("pat_str = 'y'\n")
    try_it(folder, "would not give the text back")
    (folder / "tokenization_kimi.py").write_text(f"pat_str = {'-' * 20_000}1\n")
    try_it(folder, "cannot be read")


def test_bad_ids_are_refused(tokenizer):
    for ids, phrase in (("1,520", "id 520 (place 1)"), ("-1", "id -1"), ("x", "id x"), ("1.5", "id 1.5"), ("1_0", "id 1_0"), ("+1", "id +1"), ("99999999999999999999", "id 9999")):
        refused("text", "decode", "--tokenizer", tokenizer, "--", ids, env=ENV, phrases=[phrase])


def test_wrong_usage(tokenizer, tmp_path):
    run = ("run", MODEL, "--backend", "host")
    for words, phrase in ((("text",), "wanted encode or decode"), (("text", "encode", "--tokenizer", tokenizer), "wants one TEXT"),
                          (("text", "encode", "x"), "--tokenizer DIR is missing"), (("text", "turn", "x"), "wanted encode or decode"),
                          ((*run, "--prompt-text", "x"), "--prompt-text wants --tokenizer"),
                          ((*run, "--prompt-text", "x", "--prompt", "1", "--tokenizer", tokenizer), "exclude each other"),
                          (("info", "--text", tmp_path), "--text and --tokenizer DIR go together"),
                          (("info", "--text", "--tokenizer", tokenizer, "--follow", tmp_path), "stands without")):
        refused(*words, status=2, env=ENV, phrases=[phrase])
    refused(*run, "--prompt-text", "", "--tokenizer", tokenizer, env=ENV, phrases=["--prompt-text"])
    assert "usage: k3decode text" in k3("text", "--help").out


def test_text_that_is_not_utf8_is_refused(tokenizer):
    done = subprocess.run([K3DECODE, "text", "encode", "--tokenizer", tokenizer, b"ab\xff"], capture_output=True,
                          env={**os.environ, **ENV}, timeout=60)
    assert done.returncode == 3 and re.search(rb"not UTF-8 at byte 2", done.stderr)


def test_missing_library_is_named_with_its_command(tokenizer, tmp_path):
    (tmp_path / "tiktoken.py").write_text("raise ImportError('hidden', name='tiktoken')\n")
    refused("text", "encode", "--tokenizer", tokenizer, "x", env={**ENV, "PYTHONPATH": str(tmp_path)}, phrases=["-m pip install tiktoken"])
    refused("run", MODEL, "--backend", "host", "--prompt-text", "x", "--tokenizer", tokenizer, "--output", tmp_path / "run.h5",
            env={**ENV, "PYTHONPATH": str(tmp_path)}, phrases=["-m pip install tiktoken"])
    assert not (tmp_path / "run.h5").exists()
