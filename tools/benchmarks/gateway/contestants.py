"""The contestants: the source of each gateway, and the command that runs it with one worker.

Gateways are of this checkout, the system or the index.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Template

DIRECT = "direct"
PROOFSERVE = "proofserve"
VLLM_ROUTER = "vllm-router"
NGINX = "nginx"
NAIVE = "naive"

KEYS = tuple(f"bench-key-{number}" for number in range(4))
# The packages that the requirement names, at our versions. Our own environment has more packages,
# and some of them change what httpx does for every request.
NAIVE_NEEDS = "fastapi==0.136.3 uvicorn[standard]==0.54.0 httpx==0.28.1"
NO_LIMIT = "100000"
# No limit may refuse a request: the benchmark measures the cost of counting.
NEVER_REACHED = 1_000_000_000
UPSTREAM_IDLE = 1100
# Seconds: LiteLLM brings more than a hundred packages.
INSTALL_LIMIT_S = 900.0
# Distributions install servers here, and many users do not have these folders on their PATH.
SYSTEM_FOLDERS = ("/usr/sbin", "/usr/local/sbin")


class Unusable(RuntimeError):
    """Nothing can be measured on this machine: the text says what is missing or wrong."""


class Skipped(RuntimeError):
    """One contestant cannot run: the text says why. The others still run."""


# Finds a program, or makes it available below a folder; raises Skipped.
Source = Callable[[Path], Path]


def ours(name: str, _cache: Path) -> Path:
    """A program of the environment that runs this benchmark."""
    found = Path(sys.executable).with_name(name)
    if not found.exists():
        raise Skipped(f"{found} does not exist: make setup")
    return found


def of_system(name: str, _cache: Path) -> Path:
    """A program that the distribution provides."""
    for folders in (None, ":".join(SYSTEM_FOLDERS)):
        if found := shutil.which(name, path=folders):
            return Path(found)
    raise Skipped(f"not installed: apt install {name}")


def of_index(requirements: str, name: str, cache: Path, folder: str | None = None) -> Path:
    """Packages of the index, installed once into their own environment: what pip takes."""
    home = cache / (folder or name)
    # The stamp names the requirements, so that a changed version is installed again.
    stamp = home / "installed.txt"
    if not stamp.exists() or stamp.read_text() != requirements:
        shutil.rmtree(home, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(home)])
        pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        _run([*pip, "install", "--quiet", *requirements.split()])
        stamp.write_text(requirements)
    return home / "bin" / name


def _run(argv: list[str]) -> None:
    try:
        subprocess.run(argv, check=True, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise Skipped(f"not installed within {INSTALL_LIMIT_S:.0f} s") from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
        why = lines[-1] if lines else error.stderr[-200:]
        raise Skipped(f"does not install: {why}") from None


@dataclass(frozen=True, slots=True)
class Site:
    """The program of a gateway, its backend (host:port), its ports and its folder."""

    program: Path
    backend: str
    port: int
    metrics_port: int
    folder: Path

    def write(self, name: str, text: str) -> str:
        file = self.folder / name
        file.write_text(text)
        return str(file)

    def configuration(self, name: str) -> str:
        """Write the file of that name beside this one, with what this site has. Return its path."""
        values = {"never_reached": NEVER_REACHED, "upstream_idle": UPSTREAM_IDLE}
        text = Template(Path(__file__).with_name(name).read_text())
        return self.write(name, text.substitute(values, backend=self.backend, port=self.port))


@dataclass(frozen=True, slots=True)
class Contestant:
    """A gateway. Without a source there is no gateway: clients connect to the backend."""

    name: str
    source: Source | None = None
    command: Callable[[Site], list[str]] = lambda _: []
    # The most streams that it can hold open; None: no limit.
    most_streams: int | None = None


def _proofserve(site: Site) -> list[str]:
    """Runs with all features: keys with limits, admission, metrics and counting of usage."""
    return [
        *(str(site.program), "gateway"),
        *("--backend-url", f"http://{site.backend}"),
        *("--host", "127.0.0.1"),
        *("--port", str(site.port)),
        *("--max-concurrent-requests", "2000"),
        *("--max-queued-requests", "4000"),
        *("--client-keys-file", site.write("clients.toml", _client_keys())),
    ]


def _client_keys() -> str:
    """A table for each key, with every limit set."""
    return "\n".join(
        f"[[client]]\n"
        f'name = "client-{number}"\n'
        f'key = "{key}"\n'
        f"concurrency = {NEVER_REACHED}\n"
        f"requests_per_minute = {NEVER_REACHED}\n"
        f"tokens_per_minute = {NEVER_REACHED}\n"
        for number, key in enumerate(KEYS)
    )


def _nginx(site: Site) -> list[str]:
    file = site.configuration("nginx.conf")
    return [str(site.program), "-p", str(site.folder), "-e", "error.log", "-c", file]


def _haproxy(site: Site) -> list[str]:
    return [str(site.program), "-db", "-f", site.configuration("haproxy.cfg")]


def _rust_router(*words: str) -> Callable[[Site], list[str]]:
    """The routers share their options. Round-robin is their cheapest policy."""

    def command(site: Site) -> list[str]:
        return [
            *(str(site.program), *words),
            *("--host", "127.0.0.1"),
            *("--port", str(site.port)),
            *("--worker-urls", f"http://{site.backend}"),
            *("--policy", "round_robin"),
            *("--prometheus-host", "127.0.0.1"),
            *("--prometheus-port", str(site.metrics_port)),
            *("--max-concurrent-requests", NO_LIMIT),
            *("--log-level", "error"),
        ]

    return command


def _litellm(site: Site) -> list[str]:
    """One model on one OpenAI server, open to every key. JSON is YAML too."""
    server = {"model": "openai/mock", "api_base": f"http://{site.backend}/v1", "api_key": "none"}
    config = {
        "model_list": [{"model_name": "mock", "litellm_params": server}],
        "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
    }
    return [
        # The benchmark does not need the list of prices, which would be fetched from the internet.
        *("env", "LITELLM_LOCAL_MODEL_COST_MAP=True", "LITELLM_LOG=ERROR"),
        str(site.program),
        *("--config", site.write("litellm.yaml", json.dumps(config))),
        *("--host", "127.0.0.1"),
        *("--port", str(site.port)),
        *("--num_workers", "1"),
    ]


def _naive(site: Site) -> list[str]:
    program = str(Path(__file__).with_name("naive.py"))
    return [str(site.program), program, f"http://{site.backend}", str(site.port)]


CONTESTANTS = (
    Contestant(DIRECT),
    Contestant(PROOFSERVE, partial(ours, "proofserve"), _proofserve),
    Contestant(
        VLLM_ROUTER, partial(of_index, "vllm-router==0.1.17", "vllm-router"), _rust_router()
    ),
    Contestant(NGINX, partial(of_system, "nginx"), _nginx),
    Contestant("haproxy", partial(of_system, "haproxy"), _haproxy),
    Contestant(
        "sglang-router",
        partial(of_index, "sglang-router==0.3.2", "sglang-router"),
        _rust_router("launch"),
    ),
    Contestant("smg", partial(of_index, "smg==1.13.0", "smg"), _rust_router("launch")),
    Contestant("litellm", partial(of_index, "litellm[proxy]==1.104.5", "litellm"), _litellm),
    # Its semaphore and its client's pool have a hundred places.
    Contestant(
        NAIVE, partial(of_index, NAIVE_NEEDS, "python", folder=NAIVE), _naive, most_streams=100
    ),
)


def chosen(names: Sequence[str]) -> tuple[Contestant, ...]:
    """The named contestants, or all if there are no names. Raises Unusable for another name."""
    known = {contestant.name: contestant for contestant in CONTESTANTS}
    for name in names:
        if name not in known:
            raise Unusable(f"there is no contestant {name!r}; there are {', '.join(known)}")
    return tuple(known[name] for name in names) if names else CONTESTANTS
