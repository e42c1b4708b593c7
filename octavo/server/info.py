"""Endpoints that only look: models, liveness, readiness, metrics, version."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.server.problems import reply_json
from octavo.server.service import Service


def routes(service: Service) -> list[Route]:
    info, get = Info(service), ["GET"]
    return [
        Route("/v1/models", info.models, methods=get),
        Route("/v1/models/{id:path}", info.model, methods=get),
        Route("/health", info.health, methods=get),
        Route("/ready", info.ready, methods=get),
        Route("/metrics", info.metrics, methods=get),
        Route("/load", info.load, methods=get),
        Route("/version", info.version, methods=get),
    ]


class Info:
    """The endpoints, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, request: Request) -> Response:
        return reply_json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._service.check_model(request.path_params["id"])
        return reply_json(self._model())

    def _model(self) -> dict[str, Any]:
        served = self._service.served
        return {
            "id": served.name,
            "object": "model",
            "created": served.created,
            "owned_by": "octavo",
            "max_model_len": served.door.capacity.max_context,
        }

    async def health(self, request: Request) -> Response:
        """Liveness: false once the engine is lost, and then a restart is the cure."""
        if self._service.driver.alive:
            return reply_json({"status": "ok"})
        return reply_json({"status": "failed", "reason": str(self._service.driver.failed)}, 503)

    async def ready(self, request: Request) -> Response:
        """Readiness: may traffic be sent here? Not while draining, nor when steps stall."""
        driver = self._service.driver
        stalled = driver.stalled(self._service.config.stall, driver.clock())
        for bad, word in (
            (not driver.alive, "failed"),
            (self._service.draining, "draining"),
            (stalled, "stalled"),
        ):
            if bad:
                return reply_json({"status": word}, 503)
        return reply_json({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(
            self._service.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def load(self, request: Request) -> Response:
        """How busy the server is, for balancers. server_load is vLLM's name of `requests`."""
        service = self._service
        now, live = service.metrics.snapshot(), service.occupancy.live
        return reply_json(
            {
                "server_load": live,
                "requests": live,
                "max_requests": service.occupancy.limit,
                "sequences_running": int(now["running"]),
                "sequences_waiting": int(now["waiting"]),
                "prompt_tokens_waiting": round(service.admission.queued_tokens),
                "kv_blocks": int(now["blocks"]),
                "kv_blocks_held": int(now["blocks_held"]),
                "kv_blocks_cached": int(now["blocks_cached"]),
                "kv_usage": round(now["blocks_held"] / max(now["blocks"], 1), 4),
                "draining": service.draining,
            }
        )

    async def version(self, request: Request) -> Response:
        return reply_json({"version": self._service.served.version})
