"""INTERIM: to be replaced."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from scipy.optimize import Bounds, LinearConstraint, milp

from slimgrad.planner.problem import Problem, Solution


class _M:
    def __init__(s, p):
        s.p = p
        s.off = np.cumsum([0] + [len(g) for g in p.groups])
        s.n = int(s.off[-1])
        opts = [o for g in p.groups for o in g]
        s.sec = np.array([o.seconds for o in opts])
        s.err = np.array([o.error for o in opts])
        s.kept = np.array([o.kept for o in opts], dtype=float)
        s.var = np.array([i for i, o in enumerate(opts) for q in o.spans], dtype=int)
        s.st = np.array([q.start for o in opts for q in o.spans], dtype=int)
        s.en = np.array([q.stop for o in opts for q in o.spans], dtype=int)
        s.by = np.array([q.bytes for o in opts for q in o.spans], dtype=float)
        s.floor = np.array(p.floor, dtype=float)
        cuts = np.unique(np.r_[0, s.st, s.en])
        s.cuts = cuts[cuts < len(s.floor)].astype(int)
        s.seg = np.maximum.reduceat(s.floor, s.cuts)
        s.links = []
        for gi, g in enumerate(p.groups):
            for oi, o in enumerate(g):
                for h, S in o.needs:
                    s.links.append(([s.off[gi] + oi], [s.off[h] + k for k in S]))

    def rows(s, k):
        ev = s.cuts[k]
        m = (s.st <= ev) & (ev < s.en)
        r = np.zeros(s.n)
        np.add.at(r, s.var[m], s.by[m])
        return r

    def use(s, x):
        d = np.zeros(len(s.floor) + 1)
        w = x[s.var] * s.by
        np.add.at(d, s.st, w)
        np.add.at(d, s.en, -w)
        return s.seg + np.cumsum(d)[:-1][s.cuts]

    def base(s):
        G = len(s.p.groups)
        A = sp.csr_matrix((np.ones(s.n), (np.repeat(np.arange(G), np.diff(s.off)), np.arange(s.n))), shape=(G, s.n))
        cons = [LinearConstraint(A, 1, 1)]
        if s.links:
            L = sp.lil_matrix((len(s.links), s.n))
            for i, (a, b) in enumerate(s.links):
                L[i, a] = 1
                for k in b:
                    L[i, k] = -1
            cons.append(LinearConstraint(L.tocsr(), -np.inf, 0))
        p = s.p
        if p.most_kept is not None:
            cons.append(LinearConstraint(s.kept[None] / 1e6, -np.inf, p.most_kept / 1e6))
        if p.most_seconds is not None:
            cons.append(LinearConstraint(s.sec[None] * 1e3, -np.inf, p.most_seconds * 1e3))
        if p.most_error is not None:
            cons.append(LinearConstraint(s.err[None] / max(p.most_error, 1e-12), -np.inf, 1.0))
        return cons


def _run(m, c, peak, minimize_peak=False):
    active = [int(m.seg.argmax())]
    for _ in range(60):
        cons = m.base()
        n = m.n + (1 if minimize_peak else 0)
        if minimize_peak:
            cons = [
                LinearConstraint(sp.hstack([sp.csr_matrix(k.A), sp.csr_matrix((k.A.shape[0], 1))]), k.lb, k.ub)
                for k in cons
            ]
        if peak is not None or minimize_peak:
            R = np.array([m.rows(k) for k in active]) / 1e6
            if minimize_peak:
                cons.append(LinearConstraint(np.c_[R, -np.ones(len(active))], -np.inf, -m.seg[active] / 1e6))
            else:
                cons.append(LinearConstraint(R, -np.inf, (peak - m.seg[active]) / 1e6))
        cost = np.r_[np.zeros(m.n), 1.0] if minimize_peak else c
        res = milp(
            cost,
            constraints=cons,
            integrality=np.r_[np.ones(m.n), [0]] if minimize_peak else np.ones(m.n),
            bounds=Bounds(np.zeros(n), np.r_[np.ones(m.n), [np.inf]] if minimize_peak else np.ones(m.n)),
            options={"mip_rel_gap": 1e-3, "time_limit": 20},
        )
        if res.x is None:
            return None
        x = np.round(res.x[: m.n])
        u = m.use(x)
        lim = peak if not minimize_peak else res.x[-1] * 1e6 * (1 + 1e-4) + 1
        if lim is None or u.max() <= lim:
            return x
        bad = [k for k in np.argsort(-u)[:400] if u[k] > lim and k not in active]
        pick = bad[:1] + [k for j, k in enumerate(bad[1:]) if all(abs(k - q) > 25 for q in bad[:1] + active)][:12]
        if not pick:
            return x
        active += pick
    return x


def _sol(m, x):
    choice = tuple(int(x[a:b].argmax()) for a, b in zip(m.off[:-1], m.off[1:]))
    return evaluate(m.p, choice)


def evaluate(p, choice):
    o = [g[c] for g, c in zip(p.groups, choice)]
    return Solution(
        tuple(choice),
        sum(q.seconds for q in o),
        sum(q.error for q in o),
        sum(q.kept for q in o),
        int(usage(p, choice).max()),
    )


def usage(p, choice):
    d = np.zeros(len(p.floor) + 1, dtype=np.int64)
    for g, c in zip(p.groups, choice):
        for s in g[c].spans:
            d[s.start] += s.bytes
            d[s.stop] -= s.bytes
    return np.array(p.floor, dtype=np.int64) + np.cumsum(d)[:-1]


def solve(p: Problem, *, seconds_limit: float = 30.0):
    m = _M(p)
    x = _run(m, m.sec * 1e3 + m.err * 1e-4, p.most_peak)
    return None if x is None else _sol(m, x)


def smallest(p: Problem, of: str):
    m = _M(p)
    x = _run(m, m.kept / 1e6, None) if of == "kept" else _run(m, m.sec, None, True)
    return _sol(m, x)
