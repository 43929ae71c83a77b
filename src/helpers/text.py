#!/usr/bin/env python3
"""Text to token ids and back with the tokenizer that a Kimi checkpoint ships: what `k3decode text` starts.

    text.py encode --tokenizer DIR       text (UTF-8) on standard input, ids separated by commas on standard output
    text.py decode --tokenizer DIR       the other way round

DIR holds tiktoken.model (a line a token: base64 of its bytes, and its rank), tokenizer_config.json (names of the special
tokens, if there) and the checkpoint's tokenizer class, tokenization_*.py (if there): the pattern that cuts text into pieces is
read from it, not run. Byte-pair encoding is the library tiktoken's. Special tokens that the text spells out become their ids,
and nothing is put before or after the text.
Exit status: 0 done, 2 wrong usage, 3 bad input or the library is missing.
"""
import argparse
import ast
import base64
import binascii
import json
import pathlib
import sys


def fail(message):
    print(message, file=sys.stderr)
    sys.exit(3)


try:
    import regex                # of tiktoken's own dependencies
    import tiktoken
except ImportError:
    fail(f"text needs Python's tiktoken, which {sys.executable} lacks: {sys.executable} -m pip install tiktoken (Debian: with "
         "--break-system-packages, or in a virtual environment that K3_PYTHON names)")

# Ids behind the ranks are special tokens; the tokenizer keeps room for so many, named or not.
RESERVED = 256

# How Kimi's tokenizer cuts text, for a checkpoint without its class: Han runs; words with one leading sign, in which no Han
# stands, with an English contraction; up to three digits; signs; line ends; white space.
SIGN = r"[^\r\n\p{L}\p{N}]?"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
CONTRACTION = "(?i:" + "|".join("'" + ending for ending in ("s", "t", "re", "ve", "m", "ll", "d")) + ")?"
KIMI_PATTERN = "|".join([r"[\p{Han}]+", f"{SIGN}{UPPER}*{LOWER}+{CONTRACTION}", f"{SIGN}{UPPER}+{LOWER}*{CONTRACTION}",
                         r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])


def read_ranks(path):
    """bytes -> rank of tiktoken.model."""
    ranks = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        fail(f"{path} cannot be read: {error.strerror}; --tokenizer names the directory of a checkpoint that ships tiktoken.model")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            fail(f"{path}, line {number}: wanted base64 and a rank, got {line[:60]!r}")
    if sorted(ranks.values()) != list(range(len(ranks))):
        fail(f"{path}: its {len(ranks)} ranks are not 0 to {len(ranks) - 1}, each once")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        fail(f"{path}: no token for the single byte {missing[0]}, so not every text could be encoded")
    return ranks


def read_special(folder, first):
    """name -> id of the special tokens, from the id `first` on."""
    path = folder / "tokenizer_config.json"
    named = {}
    if path.exists():
        try:
            for identifier, entry in json.loads(path.read_text(encoding="utf-8")).get("added_tokens_decoder", {}).items():
                named[int(identifier)] = entry["content"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            fail(f"{path} cannot be read: {error}")
    for identifier, content in named.items():
        if identifier < first:
            fail(f"{path}: special token {identifier} lies among the {first} ranks of tiktoken.model")
        if identifier >= 2**31 or not isinstance(content, str) or not content:
            fail(f"{path}: special token {identifier} is {content!r}: wanted an id below 2^31 and a text that is not empty")
    return {named.get(identifier, f"<|reserved_token_{identifier}|>"): identifier
            for identifier in {*range(first, first + RESERVED), *named}}


def pattern_in(path):
    """The value of pat_str in a tokenizer class, read without running it; None: it has none that is plain text."""
    def value(node):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join" and
                len(node.args) == 1 and isinstance(node.args[0], (ast.List, ast.Tuple))):
            between, pieces = value(node.func.value), [value(item) for item in node.args[0].elts]
            return None if between is None or None in pieces else between.join(pieces)
        return None

    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        fail(f"{path} cannot be read: {str(error) or repr(error)}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == "pat_str" for target in node.targets):
            return value(node.value)
    return None


def read_pattern(folder):
    classes = sorted(folder.glob("tokenization_*.py"))
    if not classes:
        return KIMI_PATTERN
    pattern = pattern_in(classes[0])
    if not pattern:
        fail(f"{classes[0]} sets no pat_str that can be read without running it; take the file away to use the pattern of Kimi K2")
    return pattern


def open_tokenizer(folder):
    ranks = read_ranks(folder / "tiktoken.model")
    pattern = read_pattern(folder)
    try:
        if regex.match(pattern, "", regex.V1):              # the library would panic
            fail(f"{folder}: pat_str {pattern[:60]!r} matches the empty text")
        return tiktoken.Encoding(name=folder.name, pat_str=pattern, mergeable_ranks=ranks,
                                 special_tokens=read_special(folder, len(ranks)))
    except (regex.error, ValueError, AssertionError, TypeError, OverflowError) as error:
        fail(f"{folder}: the tokenizer cannot be built: {error}")


def encode(tokenizer):
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        fail(f"the text is not UTF-8 at byte {error.start}")
    try:
        ids = tokenizer.encode(text, allowed_special="all")
    except Exception as error:          # whatever the library makes of the checkpoint's pattern
        fail(f"{tokenizer.name}: the text cannot be encoded: {error}")
    if tokenizer.decode_bytes(ids) != text.encode():
        fail(f"{tokenizer.name}: its ids would not give the text back: its pat_str passes over a part of it")
    print(",".join(map(str, ids)))


def decode(tokenizer):
    pieces = []
    for place, word in enumerate(sys.stdin.read().replace(",", " ").split()):
        try:
            pieces.append(tokenizer.decode_single_token_bytes(int(word if word.isascii() and word.isdigit() else "none")))
        except (ValueError, KeyError, OverflowError):
            fail(f"id {word[:40]} (place {place}) is none of the tokenizer's: wanted 0 to {tokenizer.n_vocab - 1}")
    # neither a cut in the middle of a character nor a NUL, at which C ends a text, may hide the rest
    sys.stdout.buffer.write(b"".join(pieces).decode(errors="replace").replace("\0", "\ufffd").encode())


def main():
    parser = argparse.ArgumentParser(prog="text", description=__doc__.split("\n")[0])
    parser.add_argument("direction", choices=("encode", "decode"))
    parser.add_argument("--tokenizer", required=True, type=pathlib.Path, metavar="DIR")
    options = parser.parse_args()
    (encode if options.direction == "encode" else decode)(open_tokenizer(options.tokenizer))


if __name__ == "__main__":
    main()
