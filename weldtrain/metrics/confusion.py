"""Which class is called which, at the thresholds that are in use."""

from __future__ import annotations

import numpy as np

from weldtrain.metrics.matching import Boxes, counted, match, take


def confusion(found: Boxes, truth: Boxes, thresholds: np.ndarray, classes: int) -> np.ndarray:
    """int64 [classes + 1, classes + 1]: rows are what is there, columns what was called, the last of both background: a call
    where nothing is, and a defect that was not called.

    A detection is a call from its class's threshold on, float [classes]. As in `match`, but whatever the classes: the surest call
    takes the free defect that it overlaps most, of equals one of its own class; what meets ignored truth alone counts nowhere.
    """
    found = take(found, found.scores >= np.asarray(thresholds)[found.labels - 1])
    met = match(found, truth, any_class=True)
    counts = counted(truth, met)
    there = np.append(truth.labels - 1, classes)[met]  # the last is for -1
    missed = ~truth.ignored
    missed[met[met >= 0]] = False
    matrix = np.zeros((classes + 1, classes + 1), np.int64)
    np.add.at(matrix, (there[counts], found.labels[counts] - 1), 1)
    np.add.at(matrix, (truth.labels[missed] - 1, classes), 1)
    return matrix
