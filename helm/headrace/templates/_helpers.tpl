{{/* Names. 40 characters at most: KubeRay and StatefulSets add to them. */}}
{{- define "headrace.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "headrace.release" -}}{{ .Release.Namespace }}.{{ include "headrace.name" . }}{{- end -}}

{{/* What selects the pods of a component: (root, component, pool). KubeRay sets app.kubernetes.io/name itself. */}}
{{- define "headrace.selector" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
headrace.io/component: {{ . }}
{{- end }}
{{- with .pool }}
headrace.io/pool: {{ . }}
{{- end }}
{{- end -}}

{{- define "headrace.labels" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{ include "headrace.selector" . }}
{{- end -}}

{{/* An object's metadata: (root, component, pool, suffix). */}}
{{- define "headrace.metadata" -}}
name: {{ include "headrace.name" .root }}{{ with .suffix }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "headrace.labels" . | nindent 2 }}
{{- end -}}

{{- define "headrace.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "headrace.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "headrace.name" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- define "headrace.modelFolder" -}}/models/{{ .Values.model.source | trimSuffix "/" | base }}{{- end -}}

{{- define "headrace.modelClaim" -}}{{ .Values.model.volume.existingClaim | default (printf "%s-models" (include "headrace.name" .)) }}{{- end -}}

{{- define "headrace.device" -}}{{ dig "engine" "device" "cpu" .Values.config }}{{- end -}}

{{/* How GPUs of two pods are joined. */}}
{{- define "headrace.links" -}}{{ ternary "RDMA (NIXL), else NCCL," "NCCL" (dig "handoff" "rdma" false .Values.config) }}{{- end -}}

{{/* "true" where there is a controller: Ray's, or one that flips roles and advises whoever scales StatefulSets. */}}
{{- define "headrace.controlled" -}}{{ if or (eq .Values.runtime "ray") (eq .Values.autoscaling.mode "external") }}true{{ end }}{{- end -}}

{{- define "headrace.cluster" -}}{{ .Values.config.name | default (include "headrace.name" .) }}{{- end -}}

{{/* The one headrace.yaml, as JSON (which is YAML): Helm would write large numbers with an exponent. */}}
{{- define "headrace.config" -}}
{{- $root := . -}}
{{- $config := deepCopy .Values.config -}}
{{- $pools := dict -}}
{{- range $name, $pool := .Values.pools -}}
  {{- $own := pick $pool "role" "replicas" "tp" "pp" "gpu_hour_price" -}}
  {{- if and (eq $root.Values.runtime "ray") (eq $root.Values.topology "perPool") -}}
    {{- $_ := set $own "rank_resources" (dict (ternary "GPU" "CPU" (eq (include "headrace.device" $root) "cuda")) 1 (printf "pool-%s" $name) 1) -}}
  {{- end -}}
  {{- if ne $root.Values.autoscaling.mode "off" -}}
    {{- with $pool.autoscaling -}}
      {{- $_ := set $own "min_replicas" .min -}}
      {{- $_ := set $own "max_replicas" .max -}}
    {{- end -}}
  {{- end -}}
  {{- $_ := set $pools $name $own -}}
{{- end -}}
{{- $_ := set $config "name" (include "headrace.cluster" .) -}}
{{- $_ := set $config "model" (include "headrace.modelFolder" .) -}}
{{- $_ := set $config "served_model_name" (.Values.model.servedName | default (.Values.model.source | trimSuffix "/" | base)) -}}
{{- $_ := set $config "pools" $pools -}}
{{- $mode := ternary (ternary "dry-run" "fixed" .Values.autoscaling.dryRun) .Values.autoscaling.mode (eq .Values.autoscaling.mode "off") -}}
{{- $_ := set $config "autoscaling" (merge (dict "mode" $mode) (.Values.config.autoscaling | default dict)) -}}
{{- $router := dict "host" "0.0.0.0" "http_port" .Values.router.httpPort "grpc_port" .Values.router.grpcPort -}}
{{- with .Values.router.tls -}}
{{- if .existingSecret -}}
  {{- $tls := dict "cert_file" "/etc/headrace/tls/tls.crt" "key_file" "/etc/headrace/tls/tls.key" "server_name" (include "headrace.tlsName" $root) -}}
  {{- if .hasCa -}}{{- $_ := set $tls "ca_file" "/etc/headrace/tls/ca.crt" -}}{{- end -}}
  {{- if .clientCaSecret -}}{{- $_ := set $tls "client_ca_file" "/etc/headrace/client-ca/ca.crt" -}}{{- end -}}
  {{- $_ := set $router "tls" $tls -}}
{{- end -}}
{{- end -}}
{{- $_ := set $config "router" (merge $router (.Values.config.router | default dict)) -}}
{{- toPrettyJson $config -}}
{{- end -}}

{{- define "headrace.tlsName" -}}
{{- .Values.router.tls.serverName | default (printf "%s-router.%s.svc" (include "headrace.name" .) .Release.Namespace) -}}
{{- end -}}

{{/* Which files of the routers' certificate a pod needs, as JSON: a router's all; who calls routers the CA, and the rest
where routers ask for a certificate: (root, tls: router or client, absent: none). */}}
{{- define "headrace.tlsFiles" -}}
{{- $tls := .root.Values.router.tls -}}
{{- $files := list -}}
{{- if and .tls $tls.existingSecret -}}
  {{- if or (eq .tls "router") $tls.clientCaSecret -}}{{- $files = list "tls.crt" "tls.key" -}}{{- end -}}
  {{- if $tls.hasCa -}}{{- $files = append $files "ca.crt" -}}{{- end -}}
{{- end -}}
{{- toJson $files -}}
{{- end -}}

{{/* Options of a command from a section of the configuration: what is null is left at its default. */}}
{{- define "headrace.options" -}}
{{- range $key, $value := . }}
{{- $flag := $key | replace "_" "-" }}
{{- if kindIs "bool" $value }}
- --{{ if not $value }}no-{{ end }}{{ $flag }}
{{- else if not (kindIs "invalid" $value) }}
- --{{ $flag }}={{ kindIs "string" $value | ternary $value (toJson $value) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The settings of a pool's pods: those of all workers, and what the pool has of its own laid over: (root, own). */}}
{{- define "headrace.workerSettings" -}}
{{- mergeOverwrite (deepCopy .root.Values.workers) (deepCopy (.own | default dict)) | toJson -}}
{{- end -}}

{{/* A worker pod's resources, its devices included: (root, settings, ranks). */}}
{{- define "headrace.workerResources" -}}
{{- $extra := deepCopy .settings.extraResources -}}
{{- if eq (include "headrace.device" .root) "cuda" -}}
{{- $_ := set $extra .settings.gpuResource .ranks -}}
{{- end -}}
{{- $resources := deepCopy .settings.resources -}}
{{- range $side := list "requests" "limits" -}}
{{- $_ := set $resources $side (merge (deepCopy $extra) (index $resources $side | default dict)) -}}
{{- end -}}
{{- toJson $resources -}}
{{- end -}}

{{/* Pods that so many workers of a pool need with Ray: (pool, replicas). */}}
{{- define "headrace.groupPods" -}}
{{- $stages := mul .replicas (.pool.pp | default 1) -}}
{{- $each := int (.pool.stagesPerPod | default 1) -}}
{{- div (add $stages (sub $each 1)) $each -}}
{{- end -}}
