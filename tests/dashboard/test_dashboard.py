"""A study in optuna-dashboard: what its server answers, and that it follows the database."""

import json
import platform
import sqlite3
import threading
from http.client import HTTPConnection
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from evoattn.model.records import TrialState
from tests.report.report_studies import add, make_study, timed_study, timing

pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed (evoattn[dashboard])")

from evoattn.dashboard.mirror import Mirror
from evoattn.dashboard.serve import Dashboard, DashboardError, OnlyLooks, listen, serve
from evoattn.model.errors import WrongUse


@pytest.fixture
def served(storage):
    """Serves a study on a free port; gives a function that asks it."""
    servers = []

    def start(study):
        dashboard = Dashboard(storage, study)
        server = listen(dashboard, "127.0.0.1", 0)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def ask(path):
            with urlopen(f"http://127.0.0.1:{server.server_port}{path}", timeout=100) as answer:
                return answer.read().decode(), answer.headers

        return dashboard, ask

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def trials_of(ask):
    return json.loads(ask("/api/studies/0")[0])["trials"]


def test_every_trial_is_there_with_its_value_parameters_and_source(storage, served):
    study = timed_study(storage)
    dashboard, ask = served(study)
    ours = list(storage.iter_trials(study))
    theirs = trials_of(ask)
    assert dashboard.trials == len(theirs) == len(ours)
    for our, their in zip(ours, theirs):
        attributes = {item["key"]: item["value"] for item in their["user_attrs"]}
        assert (attributes["trial"], attributes["state"]) == (str(our.number), our.state.value)
        assert their["state"] == ("Complete" if our.state is TrialState.COMPLETE else "Fail")
        assert attributes.get("reason", "") == our.reason
        values = {p["name"]: p["param_external_value"] for p in their["params"]}
        assert values["family"] == our.family
        name, value = next(iter(our.config.items()))
        assert values[f"{our.family}.{name}"] == str(value)
        (artifact,) = their["artifacts"]
        text, headers = ask(f"/artifacts/0/{their['trial_id']}/{artifact['artifact_id']}")
        assert text == storage.source(our.source_hash) and headers["Content-Type"].startswith("text/plain")
    leader = storage.leaderboard(study, 1, finalists_first=False)[0]
    best = min((t for t in theirs if t["state"] == "Complete"), key=lambda t: t["values"][0])
    assert best["values"] == [pytest.approx(leader.timing.median_us)]
    study_page = json.loads(ask("/api/studies/0")[0])
    assert study_page["name"] == study.name and study_page["objective_names"] == ["median µs"]
    assert {item["key"] for item in study_page["user_attrs"]} >= {"problem", "gpu", "sampler"}


def test_it_follows_a_search_and_its_final(storage, served):
    study = make_study(storage)
    first = add(storage, study, TrialState.COMPLETE, us=[("screen", 30.0)], A=1, B=2)
    dashboard, ask = served(study)
    assert [t["values"] for t in trials_of(ask)] == [[30.0]]
    add(storage, study, TrialState.COMPLETE, us=[("screen", 20.0)], A=1, B=2)
    dashboard.update()
    assert dashboard.trials == 2
    add(storage, study, TrialState.COMPLETE, us=[("screen", 10.0)], A=7, B=2)  # a value that no trial had
    add(storage, study, TrialState.TIMEOUT, reason="It hangs.", A=1, B=2)
    dashboard.update()
    assert dashboard.trials == 4
    storage.add_timing(first.number, timing(5.0, "final"))  # changes a trial that is shown already
    dashboard.update()
    assert [t.get("values") for t in trials_of(ask)] == [[5.0], [20.0], [10.0], None]


def asked(server_port, method, host, path="/api/studies"):
    """The status of a request, as a browser sends it that took `host` for this machine."""
    connection = HTTPConnection("127.0.0.1", server_port, timeout=100)
    connection.putrequest(method, path, skip_host=bool(host), skip_accept_encoding=True)
    if host:
        connection.putheader("Host", host)
    connection.endheaders()
    status = connection.getresponse().status
    connection.close()
    return status


def test_it_answers_only_who_looks_and_names_this_machine(storage):
    dashboard = Dashboard(storage, timed_study(storage))
    server = listen(dashboard, "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_port
    try:
        for host in ("", "localhost", f"LOCALHOST:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", platform.node()):
            assert asked(port, "GET", host) == 200, host
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "10.0.0.1", "[::2]", "[", ":80"):
            assert asked(port, "GET", host) == 403, host
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert asked(port, method, "localhost") == 405, method
        for path in ("/static/../../../../etc/passwd", "/static/no.js"):
            assert asked(port, "GET", "localhost", path) in (403, 404), path
        assert asked(port, "HEAD", "localhost") in (200, 405)  # optuna-dashboard's own word
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("bound", "host", "status"),
    [
        ("0.0.0.0", "10.0.0.1:8080", "200"),
        ("::", "[fe80::1]:8080", "200"),
        ("0.0.0.0", "evil.example", "403"),
        ("gpu7.lab", "GPU7.lab:8080", "200"),
        ("gpu7.lab", "10.0.0.1", "403"),
    ],
)
def test_a_wider_host_is_asked_by_its_name_or_by_any_address(bound, host, status):
    said = []

    def app(environ, start_response):
        start_response("200 OK", [])
        return []

    OnlyLooks(app, bound)({"REQUEST_METHOD": "GET", "HTTP_HOST": host}, lambda status, _: said.append(status))
    assert said[0].startswith(status)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("created_at", "no date"),
        ("created_at", "0001-01-01T00:00:00+00:00"),
        ("seconds", 1e17),
        ("seconds", 1e308),
        ("seconds", float("inf")),
        ("seconds", -1e300),
    ],
)
def test_times_that_no_trial_has_are_shown_as_unknown(storage, column, value):
    study = make_study(storage)
    trial = add(storage, study, TrialState.COMPLETE, us=[("screen", 30.0)], A=1, B=2)
    with sqlite3.connect(storage.place) as database:
        database.execute(f"UPDATE trials SET {column} = ? WHERE number = ?", (value, trial.number))
    assert Dashboard(storage, study).trials == 1


@pytest.mark.parametrize(
    ("column", "value"), [("config", "[1]"), ("config", "{"), ("state", "BETTER"), ("seconds", "x")]
)
def test_damaged_rows_are_passed_over(storage, column, value):
    study = make_study(storage)
    trials = [add(storage, study, TrialState.COMPLETE, us=[("screen", 30.0)], A=1, B=2) for _ in range(2)]
    dashboard = Dashboard(storage, study)
    trials += [add(storage, study, TrialState.COMPLETE, us=[("screen", 30.0)], A=1, B=2) for _ in range(3)]
    with sqlite3.connect(storage.place) as database:
        database.execute(f"UPDATE trials SET {column} = ? WHERE number = ?", (value, trials[3].number))
    with pytest.warns(RuntimeWarning, match="Passed over: "):
        dashboard.update()
    assert dashboard.trials == 4
    with pytest.warns(RuntimeWarning, match="Passed over: "):
        assert Dashboard(storage, study).trials == 4


def test_an_offline_study_says_that_nothing_was_timed(storage, served):
    study = make_study(storage, offline=True)
    add(storage, study, TrialState.ESTIMATED, cost=12.0, A=1)
    _, ask = served(study)
    page = json.loads(ask("/api/studies/0")[0])
    assert page["objective_names"] == ["relative cost"] and page["trials"][0]["values"] == [12.0]
    assert "not run on" in next(item["value"] for item in page["user_attrs"] if item["key"] == "gpu")


def test_an_unknown_source_is_not_found(storage, served):
    study = make_study(storage)
    add(storage, study, TrialState.COMPLETE, us=[("screen", 30.0)], A=1)
    _, ask = served(study)
    with pytest.raises(HTTPError) as refused:
        ask(f"/artifacts/0/0/{'0' * 64}")
    assert refused.value.code == 404


def test_without_optuna_dashboard_it_is_a_sentence(storage):
    def absent(name):
        raise ImportError(name)

    with pytest.raises(DashboardError, match=r"is not installed; `pip install 'evoattn\[dashboard\]'`"):
        Dashboard(storage, make_study(storage), load=absent)


def test_a_taken_port_is_a_sentence(storage):
    dashboard = Dashboard(storage, make_study(storage))
    taken = listen(dashboard, "127.0.0.1", 0)
    with pytest.raises(DashboardError, match=r"Port \d+ of 127.0.0.1 cannot be had .*; choose another --port"):
        listen(dashboard, "127.0.0.1", taken.server_port)
    taken.server_close()


def test_an_empty_host_does_not_open_it_to_the_network(storage):
    with pytest.raises(WrongUse, match=r"The host is empty; leave --host out for 127\.0\.0\.1"):
        listen(Dashboard(storage, make_study(storage)), "", 0)


def test_it_serves_until_it_is_interrupted_and_reads_new_trials_by_itself(storage):
    study = make_study(storage)

    class Interrupted(Dashboard):
        updates = 0

        def update(self):
            super().update()
            self.updates += 1
            if self.updates == 1:
                add(storage, study, TrialState.COMPLETE, us=[("screen", 30.0)], A=1)
            else:
                raise KeyboardInterrupt

    dashboard = Interrupted(storage, study)
    serve(dashboard, listen(dashboard, "127.0.0.1", 0), 0.01)
    assert dashboard.trials == 1


def test_of_a_study_of_many_trials_the_best_and_an_even_sample_are_shown(storage):
    study = make_study(storage)
    made = [add(storage, study, TrialState.COMPLETE, us=[("screen", 90.0 - n)], A=1, B=2) for n in range(30)]
    mirror = Mirror(storage, study, most=10)
    shown = mirror.optuna_storage.get_all_trials(0)
    numbers = [made[n].number for n in (5, 11, 17, 23, 25, 26, 27, 28, 29)]
    assert [trial.user_attrs["trial"] for trial in shown] == numbers
    assert mirror.optuna_storage.get_study_user_attrs(0)["shown"].startswith("9 of 30 trials")
    add(storage, study, TrialState.COMPLETE, us=[("screen", 5.0)], A=1, B=2)
    assert not mirror.update() and mirror.trials == 10
