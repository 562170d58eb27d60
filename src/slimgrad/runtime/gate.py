"""The gate: sole owner of saved-tensor hooks for one model, attached by module hooks and removed without trace."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from slimgrad.errors import SlimgradWarning
from slimgrad.rules import Rule, Rules, Shapes
from slimgrad.runtime.batches import Arguments, call, shapes_of, signature_of
from slimgrad.runtime.fake import check_nothing_fake, faked
from slimgrad.runtime.frame import ROOT, WorkFrame, innermost_hook
from slimgrad.runtime.graph import tensors_in
from slimgrad.runtime.growth import grown
from slimgrad.runtime.ledger import Audit, fused_in
from slimgrad.runtime.lesson import Lesson, Owners, lesson, owners_of
from slimgrad.runtime.openings import Border, Local, Opening, drop_interrupted
from slimgrad.runtime.orders import Structure, chosen, refuted, seal_held, structure
from slimgrad.runtime.outside import Outside
from slimgrad.runtime.recomputed import Recomputing
from slimgrad.runtime.stages import Stages
from slimgrad.runtime.swaps import Stock, Swaps
from slimgrad.runtime.untouched import untouched_bytes
from slimgrad.runtime.watch import WatchFrame, watched

_hooks_enabled: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]

MAX_AUDITS = 64
"""Shapes that are counted before the ledger stops following new ones: each costs one watched forward."""

MAX_LESSONS = 8
"""How often a structure that surprises is learnt anew before it is left alone."""


class Gate:
    """Watches, learns, packs. One per applied model."""

    def __init__(self, model: nn.Module, stages: Stages, min_bytes: int | None = None) -> None:
        self.model = model
        self.stages = stages
        self.rules = stages.rules
        self.min_bytes = min_bytes
        self.modules = dict(model.named_modules())
        self.structures: dict[Any, Structure] = {}
        self.taught: dict[Any, Lesson] = {}
        self.lessons: dict[Any, int] = {}
        self.audits: dict[Any, Audit] = {}
        self.last: Audit | None = None
        self.untouched: dict[Any, int | None] = {}
        """Bytes without anything of ours, where the forward does not tell; None where it cannot run on fake tensors."""
        self._frozen_untouched: dict[Shapes, int | None] = {}
        """The same where a controller freezes other parameters in each epoch: that changes nothing of it."""
        self.notes: dict[str, None] = {}
        self.outside = Outside(model, self.rules, min_bytes)
        self._parameters = tuple(model.parameters())
        self.local = Local()
        self.swaps = Swaps(self.modules, self.rules, self.local)
        self.recomputing = Recomputing(self.modules, self.rules)
        self.stock: dict[Any, Stock] = {}
        self._lock = threading.RLock()
        self._handles: dict[str, tuple[RemovableHandle, ...]] = {}
        self._root_handles: tuple[RemovableHandle, ...] = ()

    # --- attaching ---

    @property
    def attached(self) -> bool:
        return bool(self._root_handles)

    def attach(self) -> None:
        self.swaps.put_in()
        self.recomputing.put_in()
        before = self.model.register_forward_pre_hook(Border(self, ROOT, "open"), with_kwargs=True, prepend=True)
        after = self.model.register_forward_hook(Border(self, ROOT, "shut"), always_call=True)
        self._root_handles = (before, after)
        self.stages.attach()

    def remove(self) -> None:
        """Detach for good: steps are counted no more either."""
        self.stages.detach()
        self.detach()

    def detach(self) -> None:
        self.recomputing.take_out()
        self.swaps.take_out()
        with self._lock:
            for handle in (*self._root_handles, *(h for pair in self._handles.values() for h in pair)):
                handle.remove()
            self._root_handles = ()
            self._handles.clear()

    def _hook_borders(self, paths: Iterable[str]) -> None:
        """Have module hooks exactly at these paths."""
        wanted = set(paths) - {ROOT}
        with self._lock:
            for path in self._handles.keys() - wanted:
                for handle in self._handles.pop(path):
                    handle.remove()
            for path in wanted - self._handles.keys():
                module = self.modules[path]
                self._handles[path] = (
                    module.register_forward_pre_hook(Border(self, path, "enter"), prepend=True),
                    module.register_forward_hook(Border(self, path, "leave"), always_call=True),
                )

    # --- one forward ---

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model's forward begins."""
        caller = sys._getframe(2)
        openings = self.local.openings
        drop_interrupted(openings, caller)
        self.local.frame = openings[-1].frame if openings else None
        if openings and openings[-1].frame is not None:
            openings.append(Opening(caller, openings[-1].frame, nested=True))
            openings[-1].frame.enter(ROOT)
            return
        opening = Opening(caller)
        openings.append(opening)
        if self._stands_aside():
            return
        self.outside.pause()
        tensors = tuple(tensors_in((args, kwargs), depth=3))
        shapes = shapes_of(tensors)
        self._show(shapes, (args, kwargs))
        rules = self.stages.begin_forward(shapes)
        if rules is not self.rules:
            self._follow(rules)
        key = signature_of(self.modules, self._parameters, tensors)
        audit_key = key, shapes
        known = self.structures.get(key)
        opening.key, opening.audit_key = key, audit_key
        if known is not None and not known.still_holds():
            self._forget(key)
            known = None
        if known is None and self.stages.strict:
            known = self._learn_before(key, (args, kwargs))
        if known is None or known.is_stock or (audit_key not in self.audits and len(self.audits) < MAX_AUDITS):
            if self.stages.strict:
                self._count_untouched(key, shapes, (args, kwargs))
            opening.frame = self._watch(opening, known, args, kwargs)
        else:
            opening.frame = WorkFrame(known.calls, known.borders)
            self.last = self.audits.get(audit_key, self.last)
            self._hook_borders(known.borders)
        self.local.frame = opening.frame
        opening.frame.enter(ROOT)

    def _show(self, shapes: Shapes, arguments: Arguments) -> None:
        """Let who wants to see the model's forward, on fake tensors, before it begins."""
        preview = self.stages.preview(shapes)
        if preview is not None:
            with preview, torch.no_grad(), faked(self.model, arguments) as fake:
                call(fake.call, fake.arguments)

    def _learn_before(self, key: Any, arguments: Arguments) -> Structure | None:
        """Learn from fake tensors what would otherwise be held once, all of it."""
        self._look_around()
        with self._on_fakes():  # first the modules' own forwards are learnt
            self.learn_ahead(arguments)
        return self.structures.get(key)

    def _count_untouched(self, key: Any, shapes: Shapes, arguments: Arguments) -> None:
        """What the model would keep if its controller froze nothing."""
        if shapes not in self._frozen_untouched:
            with self._on_fakes(), self.stages.untouched():
                self._frozen_untouched[shapes] = untouched_bytes(self.model, arguments, self.modules)
        self.untouched[key, shapes] = self._frozen_untouched[shapes]

    @contextmanager
    def _on_fakes(self) -> Iterator[None]:
        """Inside a forward that has not begun: the model's own modules on fake tensors, which this gate lets pass."""
        self.swaps.take_out()
        self.local.is_on_fakes = True
        try:
            yield
        finally:
            self.local.is_on_fakes = False
            self.swaps.put_in()

    def _watch(self, opening: Opening, known: Structure | None, args: Any, kwargs: Any) -> WatchFrame:
        self._look_around()
        self._hook_borders(self.modules)
        opening.owners = owners_of(self.model, (args, kwargs))
        if torch.cuda.is_initialized():
            opening.allocated = torch.cuda.memory_allocated()
        if known is not None and not known.is_stock:
            return WatchFrame(known.calls, known.borders)
        frame = WatchFrame()
        frame.stock = known is None and bool(self.swaps)
        return frame

    def _look_around(self) -> None:
        """See modules and parameters that were added or replaced since; hooks on replaced ones go."""
        before, self.modules = self.modules, dict(self.model.named_modules())
        self._parameters = tuple(self.model.parameters())
        self.swaps.look(self.modules)
        self._hook_borders([path for path in self._handles if self.modules.get(path) is before.get(path)])

    def shut(self, output: Any) -> None:
        """The model's forward ends, well or by an exception (then output is None)."""
        openings = self.local.openings
        if not openings:
            return
        opening = openings.pop()
        frame = opening.frame
        self.local.frame = openings[-1].frame if openings else None
        if frame is None:
            return
        frame.leave(ROOT)
        if opening.nested:
            return
        frame.close()
        self.outside.resume()
        if isinstance(frame, WatchFrame):
            self._finish_watch(opening, frame, output)
        if frame.surprises and output is not None:
            self._surprised(opening.key, frame.surprises)

    def _finish_watch(self, opening: Opening, frame: WatchFrame, output: Any) -> None:
        assert opening.owners is not None
        known = self.structures.get(opening.key)
        if output is None:
            self._hook_borders(known.borders if known else ())
            return
        try:
            check_nothing_fake(self.model, output)
            if known is None or known.is_stock:
                known = self._learn(opening.key, frame, output, opening.owners, pack=True)
        except Exception:
            self.remove()  # a rule or the model was refused: nothing is packed, and the model is as it was
            raise
        if frame.refuted:
            self._note_refuted(frame.refuted)
            self.structures[opening.key] = self._decided(self.taught[opening.key], is_stock=known.is_stock)
        self._hook_borders(known.borders)
        before = self.untouched.get(opening.audit_key)
        fused = fused_in(frame, self.swaps, self.stock.get(opening.key))
        audit = Audit(
            frame, known, opening.owners, opening.allocated, fused, again=self.recomputing.paths, before=before
        )
        self.audits[opening.audit_key] = self.last = audit
        if not self.stages.strict and (larger := grown(self.taught[opening.key], frame)) is not None:
            self._outgrow(opening.key, audit, larger)

    def _outgrow(self, key: Any, audit: Audit, larger: Lesson) -> None:
        """Decide by tensors that are larger than those that were learnt from."""
        found = self._decided(larger, is_stock=audit.structure.is_stock)
        if found.codecs == audit.structure.codecs:
            audit.structure = found  # only what it says of the rest is other
        else:
            self._forget(key)
        self.structures[key], self.taught[key] = found, larger

    def _learn(self, key: Any, frame: WatchFrame, output: Any, owners: Owners, *, pack: bool) -> Structure:
        """Find the roles and decide; then pack what the watched forward holds."""
        roots: list[Node | None] = [tensor.grad_fn for tensor in tensors_in(output)]
        learnt = lesson(frame, roots, owners, self.modules, {})
        for rules in self.stages.to_come:  # refused now, not in the middle of a training
            chosen(learnt, rules, self.modules, all_here=self.outside.frame is None, followed=self._followed)
        found = self._decided(learnt, is_stock=frame.stock)
        if frame.stock:
            self.stock[key] = self.swaps.learn(learnt, self.min_bytes, found.derived_paths)
            found = replace(found, is_stock=bool(self.swaps))
        if pack:
            found = self._confirmed(frame, learnt, found)
            seal_held(frame, learnt, found)
        self.structures[key] = found
        self.taught[key] = learnt
        self.lessons[key] = self.lessons.get(key, 0) + 1
        return found

    def _confirmed(self, frame: WatchFrame, learnt: Lesson, found: Structure) -> Structure:
        """The structure without derivations that do not give the very same bits."""
        while names := refuted(frame, learnt, found):
            self._note_refuted(names)
            found = self._decided(learnt, is_stock=found.is_stock)
        return found

    def _note_refuted(self, names: Sequence[str]) -> None:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        self.notes[f"made again, {names[0]}{more} came out differently, so that is kept as rules say otherwise"] = None

    @property
    def _followed(self) -> set[Rule]:
        """The rules that something else than a packed tensor follows."""
        return {*self.swaps.rules, *self.recomputing.rules}

    def _decided(self, learnt: Lesson, *, is_stock: bool) -> Structure:
        return structure(
            learnt,
            self.rules,
            self.modules,
            min_bytes=self.min_bytes,
            all_here=self.outside.frame is None,  # or else sites may be outside the model
            followed=self._followed,
            swapped=self.swaps.paths,
            is_stock=is_stock,
        )

    def _follow(self, rules: Rules) -> None:
        """Other rules from now on: decide again by what is known, so that no forward holds all there is once more."""
        self.rules = rules
        self.outside.follow(rules)
        self.audits.clear()
        if self.stages.strict:  # other parameters are frozen in each epoch, and what was learnt does not come again
            for known_by_key in (self.structures, self.taught, self.lessons, self.stock):
                known_by_key.clear()
        for key, known in self.structures.items():
            self.structures[key] = self._decided(self.taught[key], is_stock=known.is_stock)

    def learn_ahead(self, arguments: Arguments) -> None:
        """Learn the sites from a forward on fake tensors, so that even the first real forward packs as it goes."""
        tensors = tuple(tensors_in(arguments, depth=3))
        key = signature_of(self.modules, self._parameters, tensors)
        if self.recomputing.paths:
            self.recomputing.take_out()
            self.untouched[key, shapes_of(tensors)] = untouched_bytes(self.model, arguments, self.modules)
        self.recomputing.put_in()
        try:
            self._learn_all_on_fakes(key, arguments)
        finally:
            if not self.attached:
                self.recomputing.take_out()

    def _learn_all_on_fakes(self, key: Any, arguments: Arguments) -> None:
        """First with the modules' own forwards, then with the ops that stand in for some."""
        found = self._learn_on_fakes(key, arguments, stock=bool(self.swaps))
        if found.is_stock:
            self.swaps.put_in()
            try:
                self._learn_on_fakes(key, arguments, stock=False)
            finally:
                self.swaps.take_out()

    def _learn_on_fakes(self, key: Any, arguments: Arguments, *, stock: bool) -> Structure:
        frame = WatchFrame()
        frame.stock = stock
        with torch.enable_grad(), faked(self.model, arguments) as fake:
            with watched(self.model, frame):
                output = call(fake.call, fake.arguments)
            owners = owners_of(self.model, fake.arguments, fake)
            return self._learn(key, frame, output, owners, pack=False)

    # --- standing aside ---

    def _stands_aside(self) -> bool:
        """Whether this forward is none of ours: no graph, a compiler's, or under somebody else's hooks."""
        if (
            self.local.is_on_fakes
            or not torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or not _hooks_enabled()
        ):
            return True
        hook = innermost_hook()
        if hook is None or getattr(hook, "__self__", None) is (self.outside.frame or self):
            return False
        self._note_foreign(hook)
        return True

    def _note_foreign(self, hook: Any) -> None:
        """Say once whose hooks are active; a checkpoint's are expected and not worth a warning."""
        owner = f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', type(hook).__name__)}"
        if owner.startswith("torch.utils.checkpoint"):
            self.notes["inside torch.utils.checkpoint the gate stands aside"] = None
            return
        note = (
            f"other saved-tensor hooks are active around the model ({owner}); only the innermost pair applies, so "
            "slimgrad stands aside and packs nothing there"
        )
        if note not in self.notes:
            self.notes[note] = None
            warnings.warn(note, SlimgradWarning, stacklevel=4)

    def _forget(self, key: Any) -> None:
        self.structures.pop(key, None)
        self.taught.pop(key, None)
        self.audits = {place: audit for place, audit in self.audits.items() if place[0] != key}

    def _surprised(self, key: Any, surprises: list[str]) -> None:
        """Another path was taken than the one learnt; what was not recognised was kept. Learn again, a few times."""
        if self.lessons.get(key, 0) < MAX_LESSONS:
            self._forget(key)
        note = "a forward took another path than the one learnt; tensors not recognised were kept as they are"
        if note not in self.notes:
            self.notes[note] = None
            warnings.warn(f"{note}. First: {surprises[0]}", SlimgradWarning, stacklevel=2)
