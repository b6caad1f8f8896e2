"""Costs that explain times: none below 0, and what is far off does not count."""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

OUTLIER = 0.05  # relative errors much above hardly count
SHRINK = 1e-4  # of what cannot be told apart, the least is taken

Vector = NDArray[np.float64]


def regression(shares: Vector) -> Vector:
    """What each column costs, where every row holds what is paid as shares of one time: all of them make 1."""
    units = np.maximum(shares.mean(axis=0), 1e-12)  # in these each cost is its share of the times
    columns = shares.shape[1]
    rows = np.vstack([shares / units, SHRINK * np.eye(columns)])
    wanted = np.append(np.ones(len(shares)), np.zeros(columns))
    x = nnls(rows, wanted)[0]
    for loss in ("soft_l1", "cauchy"):  # the second forgets outliers, but must begin near
        found = least_squares(
            lambda x: rows @ x - wanted, np.maximum(x, 1e-9), lambda _: rows, bounds=(0.0, np.inf), loss=loss,
            f_scale=OUTLIER,
        )  # fmt: skip
        x = np.asarray(found.x)
    return np.asarray(x / units)
