"""Observers of a run are called in the order of the config and named when they fail."""

from __future__ import annotations

from typing import Any

import pytest

from arb_ternary import hookimpl, hookspecs
from arb_ternary.backends.select import BackendRequest
from arb_ternary.errors import ArbError, ComponentError, Interrupted
from arb_ternary_train.observers import RunObservers

CONTEXT: Any = object()


class Notes:
    def __init__(self, log: list[str], name: str = "notes") -> None:
        self.log = log
        self.name = name

    @hookimpl
    def arb_step_end(self, step, metrics):
        self.log.append(f"{self.name}: step {step} loss {metrics['loss']}")

    @hookimpl
    def arb_run_end(self, status):
        self.log.append(f"{self.name}: {status}")


class Failing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    @hookimpl
    def arb_step_end(self):
        raise self.error

    @hookimpl
    def arb_run_end(self):
        raise self.error


def test_observers_are_called_in_order_of_the_config():
    log: list[str] = []
    observers = RunObservers({"first": Notes(log, "first"), "second": Notes(log, "second")})

    observers.call(hookspecs.arb_step_end, CONTEXT, 3, {"loss": 1.5})

    assert observers.names == ("first", "second")
    assert log == ["first: step 3 loss 1.5", "second: step 3 loss 1.5"]


def test_every_observer_hook_is_called_with_its_arguments():
    received: dict[str, dict[str, Any]] = {}

    class Everything:
        pass

    arguments = {
        "arb_run_start": ("context",),
        "arb_phase_start": ("context", "phase"),
        "arb_step_end": ("context", "step", "metrics"),
        "arb_eval_end": ("context", "step", "metrics"),
        "arb_checkpoint_save": ("context", "state"),
        "arb_checkpoint_load": ("context", "state"),
        "arb_phase_end": ("context", "phase"),
        "arb_run_end": ("context", "status"),
    }
    namespace: dict[str, Any] = {"hookimpl": hookimpl, "received": received}
    for hook, names in arguments.items():
        exec(
            f"@hookimpl\ndef {hook}(self, {', '.join(names)}):\n    received[{hook!r}] = "
            f"dict(locals())",
            namespace,
        )
        setattr(Everything, hook, namespace[hook])
    values = {
        "context": CONTEXT,
        "phase": "standard",
        "step": 7,
        "metrics": {"loss": 1.0},
        "state": {},
        "status": "failed",
    }
    observers = RunObservers({"everything": Everything()})

    for hook, names in arguments.items():
        observers.call(getattr(hookspecs, hook), **{name: values[name] for name in names})

    assert set(arguments) == {hook.__name__ for hook in hookspecs.RUN_HOOKS} - {
        "arb_select_backend"
    }
    for hook, names in arguments.items():
        assert {name: received[hook][name] for name in names} == {
            name: values[name] for name in names
        }


def test_failing_observer_ends_the_run_and_is_named():
    log: list[str] = []
    observers = RunObservers({"csv": Failing(OSError("disk full")), "notes": Notes(log)})

    with pytest.raises(ComponentError) as caught:
        observers.call(hookspecs.arb_step_end, CONTEXT, 1, {"loss": 0.0})

    assert caught.value.what == "observer 'csv', arb_step_end: OSError: disk full"
    assert isinstance(caught.value.__cause__, OSError)
    assert log == []


def test_arb_error_keeps_its_class_and_names_the_observer():
    observers = RunObservers(
        {"stop": Failing(Interrupted("asked to stop", "arb train --resume auto"))}
    )

    with pytest.raises(Interrupted) as caught:
        observers.call(hookspecs.arb_step_end, CONTEXT, 1, {})

    assert (caught.value.what, caught.value.hint, caught.value.exit_code) == (
        "observer 'stop', arb_step_end: asked to stop",
        "arb train --resume auto",
        130,
    )


def test_run_end_calls_all_observers_and_names_failures():
    log: list[str] = []
    observers = RunObservers(
        {
            "one": Failing(OSError("disk full")),
            "notes": Notes(log),
            "two": Failing(ValueError("no value")),
        }
    )

    with pytest.raises(ArbError) as caught:
        observers.call(hookspecs.arb_run_end, CONTEXT, "finished")

    assert log == ["notes: finished"]
    assert caught.value.what == (
        "observer 'one', arb_run_end: OSError: disk full; observer 'two', arb_run_end: ValueError: "
        "no value"
    )


def test_misspelt_hook_is_refused_with_the_nearest_name():
    class Misspelt:
        @hookimpl
        def arb_step_ended(self): ...

    with pytest.raises(
        ComponentError,
        match=r"observer 'csv': no hook is called 'arb_step_ended'; did you mean 'arb_step_end'\?",
    ):
        RunObservers({"csv": Misspelt()})


def test_an_observer_without_a_hook_is_refused():
    with pytest.raises(ComponentError, match="observer 'csv': it implements no hook"):
        RunObservers({"csv": object()})


def test_hook_that_runs_never_call_is_refused():
    class Registering:
        @hookimpl
        def arb_register_phases(self):
            return ()

    with pytest.raises(
        ComponentError, match="arb_register_phases is not called on the observers of a run"
    ):
        RunObservers({"csv": Registering()})


def test_unknown_hook_argument_is_refused():
    class Wrong:
        @hookimpl
        def arb_step_end(self, loss): ...

    with pytest.raises(ComponentError, match=r"observer 'csv': PluginValidationError: .*'loss'"):
        RunObservers({"csv": Wrong()})


class Around:
    """Return a wrapper in pluggy's new style, which passes the result on, or in the old style."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    @hookimpl(wrapper=True)
    def arb_step_end(self, step):
        self.log.append(f"before {step}")
        try:
            return (yield)
        finally:
            self.log.append("after")

    @hookimpl(hookwrapper=True)
    def arb_eval_end(self, step):
        self.log.append(f"before evaluation {step}")
        yield
        self.log.append("after evaluation")


class Evaluated:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    @hookimpl
    def arb_eval_end(self, step):
        self.log.append(f"evaluation {step}")


def test_an_observer_may_wrap_all_others():
    log: list[str] = []
    observers = RunObservers(
        {"notes": Notes(log), "around": Around(log), "evaluated": Evaluated(log)}
    )

    observers.call(hookspecs.arb_step_end, CONTEXT, 3, {"loss": 1.5})
    observers.call(hookspecs.arb_eval_end, CONTEXT, 3, {})

    assert log == [
        "before 3",
        "notes: step 3 loss 1.5",
        "after",
        "before evaluation 3",
        "evaluation 3",
        "after evaluation",
    ]


def test_error_through_a_wrapper_names_its_observer():
    log: list[str] = []
    observers = RunObservers({"around": Around(log), "csv": Failing(OSError("disk full"))})

    with pytest.raises(ComponentError) as caught:
        observers.call(hookspecs.arb_step_end, CONTEXT, 1, {})

    assert caught.value.what == "observer 'csv', arb_step_end: OSError: disk full"
    assert log == ["before 1", "after"]


def test_a_wrapper_that_fails_is_named():
    class Wrapper:
        @hookimpl(wrapper=True)
        def arb_step_end(self):
            yield
            raise ValueError("no value")

        @hookimpl(wrapper=True)
        def arb_run_end(self):
            yield
            raise OSError("disk full")

    log: list[str] = []
    observers = RunObservers(
        {"around": Wrapper(), "notes": Notes(log), "bad": Failing(ValueError("late"))}
    )

    with pytest.raises(ComponentError, match=r"^observer 'bad', arb_step_end: ValueError: late$"):
        observers.call(hookspecs.arb_step_end, CONTEXT, 1, {"loss": 0.0})
    with pytest.raises(ComponentError) as caught:
        observers.call(hookspecs.arb_run_end, CONTEXT, "finished")

    assert (
        caught.value.what
        == "observer 'bad', arb_run_end: ValueError: late; observer 'around', arb_run_end: "
        "OSError: disk full"
    )
    assert log == ["notes: step 1 loss 0.0", "notes: finished"]


class Opinion:
    def __init__(self, choice: str | None) -> None:
        self.choice = choice

    @hookimpl
    def arb_select_backend(self, candidates):
        return self.choice


def test_the_first_opinion_on_a_backend_counts():
    observers = RunObservers(
        {"none": Opinion(None), "this": Opinion("torch"), "that": Opinion("triton")}
    )

    assert observers.select_backend(BackendRequest(), ["triton", "torch"]) == ("this", "torch")
    assert RunObservers({"none": Opinion(None)}).select_backend(BackendRequest(), ["torch"]) is None


def test_a_wrapper_that_passes_an_opinion_on_is_not_named_for_it():
    class Wrapper:
        def __init__(self, choice: str | None) -> None:
            self.choice = choice

        @hookimpl(wrapper=True)
        def arb_select_backend(self):
            found = yield
            return self.choice or found

    this = {"this": Opinion("torch")}
    both = ["triton", "torch"]

    passed = RunObservers({"around": Wrapper(None), **this}).select_backend(BackendRequest(), both)
    changed = RunObservers({"around": Wrapper("triton"), **this}).select_backend(
        BackendRequest(), both
    )

    assert (passed, changed) == (("this", "torch"), ("around", "triton"))


def test_choice_outside_the_candidates_is_an_error():
    with pytest.raises(ComponentError) as caught:
        RunObservers({"this": Opinion("cuda")}).select_backend(
            BackendRequest(), ["triton", "torch"]
        )

    assert str(caught.value) == (
        "observer 'this': arb_select_backend chose 'cuda', which is not a candidate\ncandidates: "
        "triton, torch"
    )
