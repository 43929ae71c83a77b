"""Run and sweep files, read for `k3decode report`, which has checked what kind they are and that they are whole."""
import dataclasses
import os

import h5py
import numpy as np


class BadFile(Exception):
    """A file that cannot be reported on; the text says why."""


def text(value):
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def texts(dataset):
    return [text(value) for value in np.asarray(dataset[()]).ravel()]


@dataclasses.dataclass
class File:
    """What runs and sweeps have alike."""
    path: str
    label: str              # the file's name, told apart from the others' by name_apart
    attributes: dict        # of the root, as text

    @property
    def devices(self):
        return [line for line in self.attributes["devices"].split("\n") if line]


@dataclasses.dataclass
class Run(File):
    ending: str
    plan: str
    step_ms: np.ndarray         # [steps]
    rank_step_ms: np.ndarray    # [steps, ranks]
    phase_names: list
    phase_ms: np.ndarray        # [steps, ranks, phases]; all zero: a captured step, timed whole
    byte_names: list
    step_bytes: np.ndarray      # [ranks, parts]; None: not recorded

    @property
    def phases_timed(self):
        return self.phase_ms.size > 0 and self.phase_ms.any()

    @property
    def busiest_bytes(self):
        """What the rank with most to move must move; None: not recorded."""
        return None if self.step_bytes is None else int(self.step_bytes.sum(axis=1).max())

    def quantile(self, q):
        return float(np.quantile(self.step_ms, q))


@dataclasses.dataclass
class Sweep(File):
    contexts: np.ndarray        # [C]
    arms: list                  # names of A, B
    missing: list               # why an arm does not exist here; "": it does
    attention: np.ndarray       # [C, 2] texts
    statistics: dict            # median, min, max, p10, p90: each [C, 2]
    floor: np.ndarray           # [C] noise floor
    difference: np.ndarray      # [C] B - A
    above: np.ndarray           # [C] bool: the difference is no noise
    step_bytes: np.ndarray      # [C, 2] on the busiest rank; None: not recorded


def read_run(path, attributes, file):
    steps = int(file["decode/steps"][()])
    if steps < 1:
        raise BadFile(f"{path} holds no whole step, so there is nothing to draw")
    timings = file["timings"]
    named = "phase_names" in timings
    counted = "step_bytes" in timings
    rank_step_ms = timings["rank_step_ms"][:steps]
    return Run(path, os.path.basename(path), attributes, text(file["ending"][()]), text(file["plan"][()]),
               timings["step_ms"][:steps], rank_step_ms,
               texts(timings["phase_names"]) if named else [],
               timings["phase_ms"][:steps] if named else np.zeros((steps, rank_step_ms.shape[1], 0)),
               texts(timings["step_bytes_names"]) if counted else [],
               timings["step_bytes"][()] if counted else None)


def read_sweep(path, attributes, file):
    names, cells = texts(file["curve/statistic_names"]), file["curve/step_ms"][()]
    attention = np.array(texts(file["arms/attention"]), object).reshape(file["arms/attention"].shape)
    return Sweep(path, os.path.basename(path), attributes, file["contexts"][()], texts(file["arms/names"]),
                 texts(file["arms/missing_because"]), attention,
                 {name: cells[:, :, k] for k, name in enumerate(names)},
                 file["curve/floor_ms"][()], file["curve/difference_ms"][()], file["curve/above_floor"][()].astype(bool),
                 file["curve/step_bytes"][()].sum(axis=2) if "step_bytes" in file["curve"] else None)


READERS = {"k3decode-run": read_run, "k3decode-sweep": read_sweep}


def open_file(path):
    """Also one that is being written, or that a crash left."""
    try:
        return h5py.File(path, "r")
    except OSError:
        return h5py.File(path, "r", swmr=True)


def read(path):
    """A Run or a Sweep. Errors: BadFile."""
    try:
        with open_file(path) as file:
            attributes = {name: text(value) for name, value in file.attrs.items()}
            return READERS[attributes["format"]](path, attributes, file)
    except (OSError, KeyError, ValueError, IndexError, TypeError) as error:
        raise BadFile(f"{path} is damaged: {error}") from error


def name_apart(parts):
    """Labels of files of one name get their directories."""
    labels = [part.label for part in parts]
    for part in parts:
        if labels.count(part.label) > 1:
            part.label = part.path
