{{/* What a schema cannot say, because it takes arithmetic. Each ends the rendering, with the numbers. */}}
{{- define "headrace.check" -}}
{{- $ranks := 0 -}}
{{- $roles := dict -}}
{{- range $name, $pool := .Values.pools -}}
  {{- $tp := int ($pool.tp | default 1) -}}
  {{- $ranks = add $ranks (mul ($pool.replicas | default 1) $tp ($pool.pp | default 1)) -}}
  {{- $_ := set $roles $pool.role $name -}}
  {{- if and (eq $.Values.topology "perNode") (gt $tp (int $.Values.node.ranks)) -}}
    {{- fail (printf "pools.%s.tp: the ranks of a stage share a node, so at most node.ranks (%v), got %d" $name $.Values.node.ranks $tp) -}}
  {{- end -}}
  {{- with $pool.autoscaling -}}
    {{- if or (gt (int .min) (int ($pool.replicas | default 1))) (lt (int .max) (int ($pool.replicas | default 1))) -}}
      {{- fail (printf "pools.%s.autoscaling: min ≤ replicas ≤ max must hold, got %v ≤ %v ≤ %v" $name .min ($pool.replicas | default 1) .max) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- $class := dig "autoscaling" "service_class" (dig "admission" "service_class" "" .Values.config) .Values.config -}}
{{- if and (or (ne .Values.autoscaling.mode "off") .Values.autoscaling.dryRun) (not (hasKey (.Values.config.service_classes | default dict) ($class | default ""))) -}}
  {{- fail (printf "config.autoscaling.service_class: must name one of config.service_classes, got %q: pools are sized, or their sizes advised, for its targets" ($class | default "")) -}}
{{- end -}}
{{- if and .Values.config.canary (ne .Values.runtime "ray") -}}
  {{- fail (printf "config.canary: runtime must be ray, whose controller starts and ends its workers, got %s" .Values.runtime) -}}
{{- end -}}
{{- if not (or (hasKey $roles "decode") (hasKey $roles "unified")) -}}
  {{- fail "pools: at least one pool must decode (role decode or unified)" -}}
{{- end -}}
{{- if and (eq .Values.topology "perNode") (gt (int $ranks) (int (mul .Values.node.count .Values.node.ranks))) (ne .Values.autoscaling.mode "controller") -}}
  {{- fail (printf "pools: all workers together have %d ranks, node.count × node.ranks is %d" (int $ranks) (int (mul .Values.node.count .Values.node.ranks))) -}}
{{- end -}}
{{- end -}}
