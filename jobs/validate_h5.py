#!/usr/bin/env python3
"""Checks files of k3decode against their schema, doc/file_schema.json.

    jobs/validate_h5.py FILE.h5 …

A file is described as {"attributes": {...}, "objects": {"/path": {"kind", "type", "shape", "attributes"}}}, where type is
a NumPy name or "text", and the library jsonschema compares this with the JSON Schema of the file's format. What JSON
Schema cannot say stands in two keywords of our own: "sizes" of a format names sizes found in the file ("/config@vocab_size",
an attribute; "/decode/steps", a scalar), and "axes" of a dataset gives the size along each axis by such a name, a number,
"name+" (at least so many), or a new name, which must then be one size wherever it stands.

Needs python3-h5py and python3-jsonschema (Debian). Prints a line a fault. Exit status: 0 all are as they should be,
1 one is not, 2 wrong usage, 3 unreadable, 4 a module is missing.
"""
import json
import pathlib
import re
import sys

try:
    import h5py
    import jsonschema
    import numpy as np
except ImportError as error:
    print(f"validate_h5: {error.name} is missing; install it (Debian: python3-{error.name})", file=sys.stderr)
    sys.exit(4)

SCHEMA = pathlib.Path(__file__).resolve().parent.parent / "doc" / "file_schema.json"


def plain(value):
    """An attribute or scalar as JSON has it."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value.tolist()]
    return value.item() if isinstance(value, np.generic) else value


def type_name(dataset):
    return "text" if h5py.check_string_dtype(dataset.dtype) else dataset.dtype.name


def describe(path):
    """The description of a file, and its scalar values by path. Errors: OSError."""
    objects, scalars = {}, {}

    def visit(name, item):
        entry = dict(kind="dataset" if isinstance(item, h5py.Dataset) else "group",
                     attributes={key: plain(value) for key, value in item.attrs.items()})
        if isinstance(item, h5py.Dataset):
            entry.update(type=type_name(item), shape=list(item.shape))
            if item.shape == ():
                scalars["/" + name] = plain(item[()])
        objects["/" + name] = entry

    try:
        opened = h5py.File(path, "r")
    except OSError:         # being written, or left by a killed writer; only then, for SWMR reads damage again and again
        opened = h5py.File(path, "r", swmr=True)
    with opened as file:
        file.visititems(visit)
        attributes = {key: plain(value) for key, value in file.attrs.items()}
    return dict(attributes=attributes, objects=objects), scalars


def rules_of(schema, path):
    """The rules of the schema of one format that hold for the object at `path`."""
    objects = schema["properties"]["objects"]
    rules = [objects["properties"][path]] if path in objects.get("properties", {}) else []
    return rules + [rule for pattern, rule in objects.get("patternProperties", {}).items() if re.search(pattern, path)]


def named_sizes(schema, file, scalars):
    sizes = {}
    for name, place in schema["sizes"].items():
        where, _, attribute = place.partition("@")
        if attribute:
            attributes = file["objects"].get(where, {}).get("attributes", {}) if where != "/" else file["attributes"]
            size = attributes.get(attribute)
        else:
            size = scalars.get(where)
        if size is not None:
            sizes[name] = size
    return sizes


def axis_faults(schema, file, scalars):
    """What the keyword "axes" demands and the file lacks."""
    sizes, faults = named_sizes(schema, file, scalars), []
    for path, entry in file["objects"].items():
        for rule in rules_of(schema, path):
            axes = rule.get("axes")
            if axes is None or entry["kind"] != "dataset":
                continue
            if len(axes) != len(entry["shape"]):
                faults.append(f"{path}: {len(entry['shape'])} axes, wanted {len(axes)} ({', '.join(map(str, axes))})")
                continue
            for axis, found in zip(axes, entry["shape"]):
                least = isinstance(axis, str) and axis.endswith("+")
                wanted = axis if isinstance(axis, int) else sizes.setdefault(axis.rstrip("+"), found)
                if found < wanted or (found != wanted and not least):
                    faults.append(f"{path}: {found} along the axis {axis}, wanted {wanted}{' at least' if least else ''}")
    return faults


def faults(path, schema):
    """Sentences, none for a good file. Errors: OSError."""
    file, scalars = describe(path)
    kind = file["attributes"].get("format")
    if kind not in schema["formats"]:
        return [f"root attribute format is {kind!r}, wanted one of {', '.join(schema['formats'])}"]
    part = schema["formats"][kind]
    validator = jsonschema.Draft202012Validator(
        {**part, "$defs": schema["$defs"]}, format_checker=jsonschema.FormatChecker())
    found = []
    for error in sorted(validator.iter_errors(file), key=lambda error: list(map(str, error.absolute_path))):
        found.append(f"{' '.join(map(str, error.absolute_path)) or 'file'}: {error.message[:400]}")
    return found + axis_faults(part, file, scalars)


def load_schema():
    with open(SCHEMA) as file:
        return json.load(file)


def main(paths):
    if not paths or paths[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if paths else 2
    schema, status = load_schema(), 0
    for path in paths:
        try:
            found = faults(path, schema)
        except (OSError, RuntimeError, KeyError) as error:
            print(f"validate_h5: {path} cannot be read: {error}", file=sys.stderr)
            return 3
        print(f"{path}: {'as the schema says' if not found else f'{len(found)} faults'}")
        for fault in found:
            print(f"  {fault}")
        status = status or (1 if found else 0)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
