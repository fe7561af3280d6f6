"""Schemas of our own for what no schema of Kubernetes knows: the fields that the chart writes, and no others. `POD` is
checked as a pod beside."""

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
ANY: Schema = {"type": "object"}
POD = ANY


def closed(required: str = "", /, **fields: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "required": required.split(), "properties": fields}


def several(item: Schema, least: int = 1) -> Schema:
    return {"type": "array", "minItems": least, "items": item}


def choice(*words: str) -> Schema:
    return {"enum": list(words)}


WORDS: Schema = {"type": "object", "additionalProperties": STRING}
SECRET_KEY = closed("name key", name=STRING, key=STRING)
DURATION: Schema = {"type": "string", "pattern": "^[0-9]+(s|m|h)$"}
RELABELINGS = several(
    closed("targetLabel", targetLabel=STRING, replacement=STRING, sourceLabels=several(STRING)),
)
SECRET = closed("secret", secret=SECRET_KEY)
TLS = closed("serverName", serverName=STRING, ca=SECRET, cert=SECRET, keySecret=SECRET_KEY)
ENDPOINTS = several(
    closed(
        "port interval",
        port=STRING,
        interval=DURATION,
        relabelings=RELABELINGS,
        scheme=choice("https"),
        tlsConfig=TLS,
    )
)
SELECTOR = closed("matchLabels", matchLabels=WORDS)
RULE = {
    "oneOf": [
        closed("record expr", record=STRING, expr=STRING, labels=WORDS),
        closed(
            "alert expr labels annotations",
            alert=STRING,
            expr=STRING,
            **{"for": DURATION},
            labels=closed("severity", severity=choice("critical", "warning", "info")),
            annotations=closed(
                "summary description runbook_url", summary=STRING, description=STRING, runbook_url=STRING
            ),
        ),
    ]
}
ROUTE = {"parentRefs": several(closed("name", name=STRING, namespace=STRING)), "hostnames": several(STRING)}
BACKENDS = several(closed("name port", name=STRING, port=COUNT))

SPECS: dict[str, Schema] = {
    "RayCluster": closed(
        "rayVersion headGroupSpec workerGroupSpecs authOptions",
        rayVersion=STRING,
        authOptions=closed("mode", mode=choice("token", "disabled"), secretName=STRING),
        gcsFaultToleranceOptions=closed(
            "redisAddress",
            redisAddress=STRING,
            redisPassword=closed("valueFrom", valueFrom=closed("secretKeyRef", secretKeyRef=SECRET_KEY)),
        ),
        enableInTreeAutoscaling={"const": True},
        autoscalerOptions=closed(
            "",
            version=choice("v2"),
            idleTimeoutSeconds=COUNT,
            resources=ANY,
            securityContext=ANY,
        ),
        headGroupSpec=closed("rayStartParams template", rayStartParams=WORDS, template=POD),
        workerGroupSpecs=several(
            closed(
                "groupName minReplicas maxReplicas rayStartParams template",
                groupName=STRING,
                replicas=COUNT,
                minReplicas=COUNT,
                maxReplicas={"type": "integer", "minimum": 1},
                rayStartParams=WORDS,
                template=POD,
            )
        ),
    ),
    "ScaledObject": closed(
        "scaleTargetRef minReplicaCount maxReplicaCount triggers",
        scaleTargetRef=closed("apiVersion kind name", apiVersion=STRING, kind=STRING, name=STRING),
        minReplicaCount=COUNT,
        maxReplicaCount={"type": "integer", "minimum": 1},
        advanced=closed("", horizontalPodAutoscalerConfig=closed("behavior", behavior=ANY)),
        triggers=several(
            closed(
                "type metadata",
                type=choice("prometheus"),
                metricType=choice("Value", "AverageValue"),
                metadata=closed("serverAddress query threshold", serverAddress=STRING, query=STRING, threshold=STRING),
            )
        ),
    ),
    "ServiceMonitor": closed("selector endpoints", selector=SELECTOR, endpoints=ENDPOINTS),
    "PodMonitor": closed("selector podMetricsEndpoints", selector=SELECTOR, podMetricsEndpoints=ENDPOINTS),
    "ScrapeConfig": closed(
        "httpSDConfigs",
        scrapeInterval=DURATION,
        httpSDConfigs=several(closed("url", url=STRING, refreshInterval=DURATION)),
        relabelings=RELABELINGS,
    ),
    "PrometheusRule": closed("groups", groups=several(closed("name rules", name=STRING, rules=several(RULE)))),
    "HTTPRoute": closed(
        "parentRefs rules",
        **ROUTE,
        rules=several(closed("backendRefs", matches=several(ANY), backendRefs=BACKENDS)),
    ),
    "GRPCRoute": closed(
        "parentRefs rules",
        **ROUTE,
        rules=several(closed("backendRefs", matches=several(ANY), backendRefs=BACKENDS)),
    ),
}
