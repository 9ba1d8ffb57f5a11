"""py-libp2p is imported without the HTTP clients that nothing here calls."""

import subprocess
import sys

import pytest


def run(code: str) -> None:
    """Run in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.real
def test_the_node_loads_no_http_client_and_the_app_still_gets_the_real_one() -> None:
    run(
        "import sys\n"
        "from dep2p.host.libp2p_import import import_libp2p\n"
        "import_libp2p()\n"
        "import dep2p.host.host\n"
        "assert 'libp2p' in sys.modules\n"
        "assert not {'httpx', 'requests', 'rich'} & set(sys.modules)\n"
        "import httpx, requests\n"
        "assert httpx.Client().__class__.__module__.startswith('httpx')\n"
        "assert requests.Session\n"
    )


@pytest.mark.real
def test_an_http_client_that_the_app_loaded_before_is_left_alone() -> None:
    run(
        "import sys, httpx\n"
        "from dep2p.host.libp2p_import import import_libp2p\n"
        "import_libp2p()\n"
        "assert sys.modules['httpx'] is httpx\n"
        "assert 'requests' not in sys.modules\n"
    )


@pytest.mark.real
def test_upstream_still_loads_them_by_itself() -> None:
    """Fails when py-libp2p stops doing so: then dep2p/host/libp2p_import.py can go."""
    run("import sys, libp2p; assert {'httpx', 'requests'} <= set(sys.modules)")


@pytest.mark.real
def test_upstream_prints_no_line_per_hostile_event() -> None:
    run(
        "import io, logging, sys\n"
        "from dep2p.host.libp2p_import import import_libp2p\n"
        "import_libp2p()\n"
        "import dep2p.host.host\n"
        "sys.stderr = printed = io.StringIO()\n"
        "logging.getLogger('libp2p.transport.quic.listener').error('a stranger did something')\n"
        "assert printed.getvalue() == '', printed.getvalue()\n"
    )
