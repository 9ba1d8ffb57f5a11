"""`dep2p reply`: what answers, what the caller gets when it fails, and how much runs at once."""

import base64
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dep2p.client import ControlError
from dep2p.control_api.errors import error_from_problem
from dep2p.errors import MessageTooLargeError
from dep2p.gossipsub.topic_types import Lagged, TopicMessage
from dep2p.types import AnswerOutcome, PeerId

ANN = "12D3KooWHdiAxVd8uMQR1hGWXccidmfCwLqcMpGwR6QcTP6QRMuD"


def answers(fake: Any) -> dict[str, Any]:
    return {
        number: base64.b64decode(answer["data"]) if "data" in answer else answer["error"]
        for number, answer in fake.replies.items()
    }


def test_echo_and_count(cli: Callable[..., Any], fake: Any) -> None:
    fake.incoming = [fake.incoming_request(b"a", 1), fake.incoming_request(b"b", 2), fake.incoming_request(b"c", 3)]
    done = cli("reply", "greet", "--echo", "--count", "2")
    assert done.code == 0 and answers(fake) == {"1": b"a", "2": b"b"}
    assert done.err.splitlines()[0] == "waiting for requests 'greet'; Ctrl-C ends"
    assert done.out == "" and "[#2] 12D3KooW…RMuD  1 B  answered 1 B" in done.err
    assert fake.calls == [("reply", ("greet", None, 8))]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "give either the NAME of requests or the --topic"),
        (("greet", "--topic", "chat"), "give either the NAME of requests or the --topic"),
        (("--topic", "chat", "--version", "1"), "--topic goes without them"),
        (("--topic", "chat", "--schema", "s"), "--topic goes without them"),
    ],
)
def test_a_name_or_a_topic(cli: Callable[..., Any], words: tuple[str, ...], says: str) -> None:
    done = cli("reply", "--echo", *words)
    assert done.code == 2 and says in done.err


class Question(TopicMessage):
    """A message whose author waits for an answer."""

    outcome: AnswerOutcome = "taken"

    def __init__(self, body: bytes, given: list[tuple[str, bytes | str]], outcome: AnswerOutcome = "taken") -> None:
        super().__init__("chat", body, PeerId(ANN), 1, b"id", None)
        self.given = given
        self.outcome = outcome

    @property
    def wants_answer(self) -> bool:
        return True

    async def reply(self, body: bytes, *, headers: Mapping[str, object] | None = None) -> AnswerOutcome:
        self.given.append(("reply", body))
        return self.outcome

    async def fail(self, text: str) -> AnswerOutcome:
        self.given.append(("fail", text))
        return self.outcome


def test_questions_in_a_topic_are_answered_and_other_messages_are_not(cli: Callable[..., Any], fake: Any) -> None:
    given: list[tuple[str, bytes | str]] = []
    plain = TopicMessage("chat", b"not a question", PeerId(ANN), 1, b"id", None)
    fake.incoming = [plain, Question(b"a", given), Lagged(0), Lagged(7), Question(b"b", given, "late")]
    done = cli("reply", "--topic", "chat", "--echo")
    assert given == [("reply", b"a"), ("reply", b"b")]
    assert done.err.splitlines()[0] == "waiting for questions in 'chat'; Ctrl-C ends"
    assert "[#1] 12D3KooW…RMuD  1 B  answered 1 B" in done.err
    assert "7 messages were dropped unanswered" in done.err and " 0 messages" not in done.err
    assert "failed: not taken by its author: late" in done.err
    given.clear()
    fake.incoming = [Question(b"a", given)]
    cli("reply", "--topic", "chat", "-c", "echo no stock >&2; exit 4")
    assert given == [("fail", "the command ended with status 4: no stock")]


def test_json_lines_of_answers_and_failures(cli: Callable[..., Any], fake: Any) -> None:
    fake.incoming = [fake.incoming_request(b"hi")]
    assert cli("reply", "greet", "--echo", "--json").lines == [
        {
            "peer": ANN, "name": "greet", "ok": True,
            "request": {"data": "aGk=", "encoding": "base64", "text": "hi"},
            "answer": {"data": "aGk=", "encoding": "base64", "text": "hi"},
        }
    ]  # fmt: skip
    (line,) = cli("reply", "greet", "--command", "exit 3", "--json").lines
    assert line["ok"] is False and line["error"] == "the command ended with status 3"


def test_a_command_gets_the_payload_and_its_environment(cli: Callable[..., Any], fake: Any) -> None:
    fake.incoming = [fake.incoming_request(b"ann\x00\xff")]
    assert cli("reply", "greet", "-c", 'cat; printf "|$DEP2P_PEER|$DEP2P_NAME|$DEP2P_HEADERS"').code == 0
    assert answers(fake) == {"1": b"ann\x00\xff|" + f'{ANN}|greet|{{"lang": "en"}}'.encode()}


def test_a_failing_command_is_a_failed_request_with_the_end_of_its_stderr(cli: Callable[..., Any], fake: Any) -> None:
    fake.incoming = [fake.incoming_request(b"")]
    cli("reply", "greet", "-c", "echo partial; echo no such user >&2; exit 7")
    assert answers(fake) == {"1": "the command ended with status 7: no such user"}


def test_a_command_that_reads_nothing_of_a_large_payload_still_answers(cli: Callable[..., Any], fake: Any) -> None:
    fake.incoming = [fake.incoming_request(bytes(1_000_000))]
    cli("reply", "greet", "-c", "echo ok")
    assert answers(fake) == {"1": b"ok\n"}


def test_a_large_payload_and_a_large_answer_do_not_block_each_other(cli: Callable[..., Any], fake: Any) -> None:
    data = bytes(range(256)) * 4_000
    fake.incoming = [fake.incoming_request(data)]
    cli("reply", "greet", "-c", "cat")
    assert answers(fake) == {"1": data}


def living_in_group(group: str) -> list[str]:
    """Pids of the processes of a group that are no zombies."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue  # it ended just now
        if process_group == group and state != "Z":
            found.append(path.parent.name)
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_command_past_the_deadline_is_killed_with_its_children(
    cli: Callable[..., Any], fake: Any, tmp_path: Path
) -> None:
    fake.incoming = [fake.incoming_request(b"", deadline_ms=300)]
    started = time.monotonic()
    cli("reply", "greet", "-c", f"echo $$ > {tmp_path}/pid; sleep 60 & sleep 60")
    assert time.monotonic() - started < 20
    assert answers(fake) == {"1": "the command did not finish before the deadline"}
    group = (tmp_path / "pid").read_text().strip()
    wait_until(lambda: not living_in_group(group))


def test_too_large_an_output_is_cut_off(cli: Callable[..., Any], fake: Any) -> None:
    fake.incoming = [fake.incoming_request(b"")]
    cli("reply", "greet", "-c", "yes")
    assert answers(fake) == {"1": "the command's answer is over 16.0 MiB"}


def test_a_file_is_read_anew_for_each_request(cli: Callable[..., Any], fake: Any, tmp_path: Path) -> None:
    path = tmp_path / "answer.txt"
    path.write_text("first")
    fake.incoming = [fake.incoming_request(b"")]
    cli("reply", "greet", "--file", str(path))
    assert answers(fake) == {"1": b"first"}
    missing = cli("reply", "greet", "--file", str(tmp_path / "none"))
    assert missing.code == 4 and "D6006" in missing.err


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "answer_script.py"
    path.write_text(
        "from dep2p.errors import HandlerError\n"
        "def shout(request):\n    return request.body.upper() + request.headers['lang'].encode()\n"
        "async def later(request):\n    return f'from {request.peer[-4:]}'\n"
        "def told(request):\n    raise HandlerError('no such user')\n"
        "def bug(request):\n    return 1 / 0\n"
        "def wrong(request):\n    return 42\n"
        "constant = 3\n"
    )
    return path


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        ("shout", b"HIen"),
        ("later", b"from RMuD"),
        ("told", "no such user"),
        ("bug", "the handler failed"),
        ("wrong", "the handler failed"),
    ],
)
def test_a_python_function_answers(
    cli: Callable[..., Any], fake: Any, script: Path, function: str, answer: bytes | str
) -> None:
    fake.incoming = [fake.incoming_request(b"hi")]
    done = cli("reply", "greet", "--script", f"{script}:{function}")
    assert done.code == 0 and answers(fake) == {"1": answer}
    assert ("ZeroDivisionError" in done.err) is (function == "bug")  # the cause is for this side only
    sys.modules.pop("answer_script", None)


@pytest.mark.parametrize(
    ("text", "code"), [("{}", 2), ("{}:nothing", 2), ("{}:constant", 2), ("/nowhere.py:f", 4), ("nonsense", 2)]
)
def test_a_wrong_script_is_reported_before_any_request(
    cli: Callable[..., Any], fake: Any, script: Path, text: str, code: int
) -> None:
    done = cli("reply", "greet", "--script", text.format(script))
    assert done.code == code and done.err.startswith("error: ") and fake.calls == []


def test_an_answer_that_comes_too_late_or_is_too_large_is_reported_and_the_next_is_served(
    cli: Callable[..., Any], fake: Any
) -> None:
    def failing(error: Exception, number: int) -> Any:
        request = fake.incoming_request(b"x", number)

        async def respond(_body: bytes, failure: str | None) -> None:
            if failure is None:
                raise error
            fake.replies[str(number)] = {"error": failure}

        return type(request)(request.request, respond)

    late = ControlError({"code": "D5011", "status": 404, "detail": "the caller no longer waits"})
    fake.incoming = [failing(late, 1), failing(MessageTooLargeError("too large"), 2), fake.incoming_request(b"y", 3)]
    done = cli("reply", "greet", "--echo")
    assert done.code == 0 and "failed: too late: the caller no longer waits" in done.err
    assert answers(fake) == {"2": "the answer is too large for a message: 1 B", "3": b"y"}


def test_a_taken_name_is_refused_with_exit_6(cli: Callable[..., Any], fake: Any, refused: Exception) -> None:
    fake.incoming = [refused]
    done = cli("reply", "greet", "--echo")
    assert done.code == 6 and "another program answers to 'greet'" in done.err and "D5012" in done.err


def test_no_more_run_at_once_than_asked(cli: Callable[..., Any], fake: Any, tmp_path: Path) -> None:
    fake.incoming = [fake.incoming_request(b"", number) for number in range(6)]
    log = tmp_path / "log"
    cli("reply", "greet", "--concurrency", "2", "-c", f"echo + >> {log}; sleep 0.05; echo - >> {log}")
    running = most = 0
    for line in log.read_text().split():
        running += 1 if line == "+" else -1
        most = max(most, running)
    assert most <= 2 and len(answers(fake)) == 6


def test_an_answer_too_large_for_the_control_api_fails_the_request_at_once(cli: Callable[..., Any], fake: Any) -> None:
    request = fake.incoming_request(b"x")

    async def respond(_body: bytes, failure: str | None) -> None:
        if failure is None:
            raise error_from_problem({"code": "D1007", "status": 413, "detail": "the body has 7 bytes"})
        fake.replies["1"] = {"error": failure}

    fake.incoming = [type(request)(request.request, respond)]
    assert cli("reply", "greet", "--echo").code == 0
    assert answers(fake) == {"1": "the answer is too large for a message: 1 B"}


def test_the_traceback_of_a_script_begins_in_the_script(cli: Callable[..., Any], fake: Any, script: Path) -> None:
    fake.incoming = [fake.incoming_request(b"hi")]
    done = cli("reply", "greet", "--script", f"{script}:bug")
    assert "ZeroDivisionError" in done.err and done.err.count('File "') == 1 and "answer_script.py" in done.err
    sys.modules.pop("answer_script", None)
