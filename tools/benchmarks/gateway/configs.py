"""Configuration files: each gateway with one worker, without an access log, with TCP_NODELAY."""

import json
from collections.abc import Sequence

# No limit may refuse a request: the benchmark measures the cost of counting.
NEVER_REACHED = 1_000_000_000
UPSTREAM_IDLE = 1100


def client_keys(keys: Sequence[str]) -> str:
    """The file of ``--client-keys-file``: a table for each key, with every limit set."""
    return "\n".join(
        f"[[client]]\n"
        f'name = "client-{number}"\n'
        f'key = "{key}"\n'
        f"concurrency = {NEVER_REACHED}\n"
        f"requests_per_minute = {NEVER_REACHED}\n"
        f"tokens_per_minute = {NEVER_REACHED}\n"
        for number, key in enumerate(keys)
    )


def nginx(backend: str, port: int) -> str:
    """A reverse proxy that keeps its upstream connections and buffers no answer.

    Files go to the working folder. ``user root`` lets the worker write there when root runs it,
    and has no effect for other users.
    """
    return f"""\
daemon off;
user root;
worker_processes 1;
pid nginx.pid;
error_log error.log error;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    client_body_buffer_size 1m;
    keepalive_requests {NEVER_REACHED};
    tcp_nodelay on;
    upstream backend {{
        server {backend};
        keepalive {UPSTREAM_IDLE};
        keepalive_requests {NEVER_REACHED};
    }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{
            proxy_pass http://backend;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
        }}
    }}
}}
"""


def haproxy(backend: str, port: int) -> str:
    """A reverse proxy that keeps its upstream connections and sends every piece at once."""
    return f"""\
global
    nbthread 1
    maxconn 8192
    tune.idle-pool.shared off
defaults
    mode http
    timeout connect 5s
    timeout client 10m
    timeout server 10m
    option http-keep-alive
    option http-no-delay
    http-reuse always
frontend clients
    bind 127.0.0.1:{port} backlog 4096
    default_backend servers
backend servers
    server mock {backend} pool-max-conn {UPSTREAM_IDLE}
"""


def litellm(backend: str) -> str:
    """One model on one OpenAI server, open to every key. JSON is YAML too."""
    model = {
        "model_name": "mock",
        "litellm_params": {
            "model": "openai/mock",
            "api_base": f"http://{backend}/v1",
            "api_key": "none",
        },
    }
    settings = {"dangerously_permit_weak_or_unset_master_key": True}
    return json.dumps({"model_list": [model], "general_settings": settings})
