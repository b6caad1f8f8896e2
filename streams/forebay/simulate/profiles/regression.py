"""Robust regression with non-negative costs."""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

OUTLIER = 0.05  # relative errors far above this hardly count
SHRINK = 1e-4  # weak regularization: of indistinguishable solutions, take the smallest

Vector = NDArray[np.float64]
Errors = tuple[float, float]  # p50 and p90 of relative errors


def fitted(rows: Vector, times_us: Vector, first: int) -> tuple[list[float], Errors, Errors]:
    """Return the costs that explain times best, and the errors of the `first` times and of the others.

    `rows` has the amount of each kind of work, in columns, for each time.
    """
    shares = rows / times_us[:, None]
    costs = regression(shares)
    errors = np.abs(shares @ costs - 1.0)
    ends, others = (tuple(map(float, np.percentile(part, (50, 90)))) for part in (errors[:first], errors[first:]))
    return list(map(float, costs)), (ends[0], ends[1]), (others[0], others[1])


def regression(shares: Vector) -> Vector:
    """Return the non-negative cost of each column that explains the observed times best, robust to outliers.

    `shares` has a row per observed time and a column per kind of work. A cell is the amount of that work, divided by
    the time. With the right costs the sum of amount times cost is 1 in each row.
    """
    units = np.maximum(shares.mean(axis=0), 1e-12)  # scales each cost to its share of the times
    columns = shares.shape[1]
    rows = np.vstack([shares / units, SHRINK * np.eye(columns)])
    wanted = np.append(np.ones(len(shares)), np.zeros(columns))
    x = nnls(rows, wanted)[0]
    for loss in ("soft_l1", "cauchy"):  # cauchy ignores outliers, but needs a good start
        found = least_squares(
            lambda x: rows @ x - wanted, np.maximum(x, 1e-9), lambda _: rows, bounds=(0.0, np.inf), loss=loss,
            f_scale=OUTLIER,
        )  # fmt: skip
        x = np.asarray(found.x)
    return np.asarray(x / units)
