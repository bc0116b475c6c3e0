"""The web around a service: FastAPI's routes, OpenAI's errors, uvicorn.

Annotations are no strings here: FastAPI reads those of handlers, which see names imported inside functions.
"""

import asyncio
import signal
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa import __version__

from ..engine import Engine
from .errors import FAILED, ApiError, explain
from .guard import Guard
from .models import (
    ChatReply,
    ChatRequest,
    CompletionRequest,
    ErrorReply,
    Health,
    ModelCard,
    ModelList,
    TextReply,
)
from .serving import Service, Settings
from .tickets import Gone

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

PAGE = Path(__file__).with_name("page")
FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
# The page is its three files, and asks nobody but this server.
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
CLIENT_GONE = 499  # nobody reads it; logs do


def check_packages() -> None:
    """Import what a server needs, so that what lacks is said before a model is loaded.

    Raises:
        ImportError: a package is not there.
    """
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401


def create_app(engine: Engine, settings: Settings) -> "FastAPI":
    """The application (ASGI). Its lifespan starts and stops the thread that decodes.

    Raises:
        UserError: a trunk without tokenizer.
    """
    from fastapi import FastAPI

    service = Service(engine, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        service.scheduler.start()
        yield
        await asyncio.to_thread(service.scheduler.stop)

    app = FastAPI(
        title="medusa", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False
    )
    app.state.service = service
    _add_errors(app)
    _add_answers(app, service)
    _add_facts(app, service)
    _add_page(app)
    app.add_middleware(Guard, body=settings.body, seconds=settings.timeout, key=settings.key, hosts=settings.hosts)
    _describe(app, settings)
    return app


def web_server(app: "FastAPI", grace: float) -> "uvicorn.Server":
    """What serves an application; once it is told to stop, what is under way has ``grace`` seconds to end."""
    import uvicorn

    seconds = max(1, round(grace))
    return uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=seconds, lifespan="on")
    )


def serve(app: "FastAPI", listener: socket.socket, grace: float) -> None:
    """Serve on a socket that is bound, until SIGINT or SIGTERM."""
    with _signals_end_quietly():
        web_server(app, grace).run(sockets=[listener])


@contextmanager
def _signals_end_quietly() -> Any:
    """uvicorn raises the signal that stopped it once more when all is done: then it has had its effect."""
    names = (signal.SIGINT, signal.SIGTERM)
    before = {name: signal.signal(name, lambda number, frame: None) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _add_errors(app: "FastAPI") -> None:
    from fastapi import Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, Response
    from starlette.exceptions import HTTPException

    def reply(error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return reply(error)

    @app.exception_handler(Gone)
    async def gone(request: Request, error: Gone) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        chat = request.url.path.startswith("/v1/chat")
        return reply(explain(error.errors(), list((ChatRequest if chat else CompletionRequest).model_fields)))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        said = f"{request.method} {request.url.path}: {error.detail}"
        return reply(ApiError(error.status_code, said, headers=error.headers))

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:
        return reply(ApiError(500, f"the server failed ({type(error).__name__})", kind=FAILED))


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorReply} for status in statuses}


EVENT = {
    "type": "object",
    "description": "One of the events: a chunk as JSON, or [DONE].",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
STREAM = {"content": {"text/event-stream": {"schema": EVENT}}}


def _add_answers(app: "FastAPI", service: Service) -> None:
    from fastapi import Request
    from fastapi.responses import JSONResponse, Response, StreamingResponse

    async def answer(request: Request, read: Any, body: Any) -> Response:
        order = await asyncio.to_thread(read, body)
        ticket = service.ticket(order, request.receive)
        if order.stream:
            headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
            return StreamingResponse(service.stream(order, ticket), media_type="text/event-stream", headers=headers)
        return JSONResponse(await service.answer(order, ticket))

    errors = _errors(400, 401, 403, 404, 408, 413, 429, 500, 503, 504)

    @app.post("/v1/chat/completions", responses={200: {"model": ChatReply, **STREAM}, **errors})
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answer a chat, as the model's own template puts it."""
        return await answer(request, service.chat, body)

    @app.post("/v1/completions", responses={200: {"model": TextReply, **STREAM}, **errors})
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue texts."""
        return await answer(request, service.complete, body)


def _add_facts(app: "FastAPI", service: Service) -> None:
    from fastapi.responses import JSONResponse, Response

    @app.get("/v1/models", responses={200: {"model": ModelList}, **_errors(401, 403)})
    async def models() -> Response:
        """The one model that is served."""
        return JSONResponse(service.models())

    @app.get("/v1/models/{name:path}", responses={200: {"model": ModelCard}, **_errors(401, 403, 404)})
    async def model(name: str) -> Response:
        """What is known of a model."""
        return JSONResponse(service.model(name))

    @app.get("/health", responses={200: {"model": Health}, 503: {"model": Health}, **_errors(403)})
    async def health() -> Response:
        """Whether decoding goes on."""
        found = service.health()
        return JSONResponse(found, 200 if found["status"] == "ok" else 503)

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **_errors(401, 403)},
    )
    async def metrics() -> Response:
        """Prometheus' figures."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_page(app: "FastAPI") -> None:
    from fastapi.responses import Response

    def add(path: str, name: str, media_type: str) -> None:
        @app.get(path, include_in_schema=False)
        async def file() -> Response:
            return Response((PAGE / name).read_bytes(), media_type=media_type, headers=PAGE_HEADERS)

    for path, (name, media_type) in FILES.items():
        add(path, name, media_type)


def _describe(app: "FastAPI", settings: Settings) -> None:
    """Leave out of the OpenAPI what FastAPI says of errors and is not so here, and say what the guard asks."""
    made = app.openapi()
    for path, methods in made["paths"].items():
        for method in methods.values():
            method["responses"].pop("422", None)
            if settings.key is not None and path != "/health":
                method["security"] = [{"bearer": []}]
    schemas: dict[str, Any] = made["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    if settings.key is not None:
        made["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}


def urls(listener: socket.socket) -> Mapping[str, str]:
    """Where a bound socket is reached: the page, and what OpenAI's clients call ``base_url``."""
    host, port = listener.getsockname()[:2]
    root = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    return {"page": f"{root}/", "api": f"{root}/v1"}
