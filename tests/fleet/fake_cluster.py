"""A cluster in this process, in place of Ray: calls run at once, or wait until a test lets them."""

import sys
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace

ERRORS = (
    *("NodeDied", "LocalRayletDied", "OwnerDied", "ObjectLost"),
    *("ActorDied", "ActorUnavailable", "WorkerCrashed", "OutOfMemory"),
)


class RayTaskError(Exception):
    """What a task raised, wrapped."""

    def __init__(self, cause):
        super().__init__(f"wrapped {cause}")
        self.cause = cause


class Ref:
    """Of an answer."""

    def __init__(self):
        self.of = Future()

    def future(self):
        return self.of


class Cluster:
    """What `import ray` gives. `said` has what was asked of it; `held` keeps calls whose name it has from running."""

    def __init__(self):
        self.said, self.held, self.waiting, self.alive = [], set(), [], {"one": True, "gone": False}
        self.resources, self.refuses = {"CPU": 4.0, "GPU": 2.0}, None
        names = {f"{name}Error": type(f"{name}Error", (Exception,), {}) for name in ERRORS}
        self.exceptions = SimpleNamespace(RayTaskError=RayTaskError, **names)

    def init(self, **words):
        self.said.append(("init", words))
        if self.refuses:
            raise self.refuses

    def shutdown(self):
        self.said.append(("shutdown", None))

    def cluster_resources(self):
        return self.resources

    def nodes(self):
        return [{"NodeID": name, "Alive": alive} for name, alive in self.alive.items()]

    def remote(self, **options):
        self.said.append(("remote", options))
        return lambda made: self._actors(made) if isinstance(made, type) else self._tasks(made)

    def _tasks(self, function):
        def remote(*args):
            return self._call(function.__name__, function, args)

        def options(scheduling_strategy):
            self.said.append(("on", (scheduling_strategy.node_id, scheduling_strategy.soft)))
            return SimpleNamespace(remote=remote)

        return SimpleNamespace(remote=remote, options=options)

    def _actors(self, made):
        def remote():
            actor = made()
            self.said.append(("actor", actor))
            methods = {name: getattr(actor, name) for name in ("describe", "start", "run")}
            return SimpleNamespace(
                of=actor, **{name: SimpleNamespace(remote=self._method(name, call)) for name, call in methods.items()}
            )

        return SimpleNamespace(remote=remote)

    def _method(self, name, call):
        return lambda *args: self._call(name, call, args)

    def _call(self, name, call, args):
        ref = Ref()
        self.said.append((name, args))
        if name in self.held:
            self.waiting.append(ref)
            return ref
        try:
            ref.of.set_result(call(*args))
        except Exception as error:
            ref.of.set_exception(RayTaskError(error))
        return ref

    def wait(self, refs, num_returns, timeout):
        self.said.append(("wait", (num_returns, timeout)))
        done = [ref for ref in refs if ref.of.done()]
        return done, [ref for ref in refs if ref not in done]

    def get(self, found):
        if isinstance(found, list):
            return [self.get(one) for one in found]
        return found.of.result()

    def cancel(self, ref, force):
        self.said.append(("cancel", (ref, force)))

    def kill(self, actor):
        self.said.append(("kill", actor))

    def asked(self, name):
        return [what for said, what in self.said if said == name]


def put(monkeypatch) -> Cluster:
    """A cluster that `import ray` finds."""
    cluster = Cluster()
    strategies = ModuleType("ray.util.scheduling_strategies")
    strategies.NodeAffinitySchedulingStrategy = lambda node, soft: SimpleNamespace(node_id=node, soft=soft)
    for name, module in (("ray", cluster), ("ray.util", ModuleType("ray.util")), (strategies.__name__, strategies)):
        monkeypatch.setitem(sys.modules, name, module)
    return cluster
