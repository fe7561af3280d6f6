{{/*
The template of every pod: (root, component, pool, labels, settings, graceSeconds, container, resources, image, and the
volumes it needs: model, config, sharedMemory, keys, tenants, tls: as `router` or as `client`). `container` is the YAML of what only this container has.
*/}}
{{- define "headrace.pod" -}}
{{- $root := .root -}}
{{- $pod := .settings -}}
{{- $tls := $root.Values.router.tls -}}
{{- $tlsFiles := include "headrace.tlsFiles" . | fromJsonArray -}}
{{- $clientCa := and (eq (.tls | default "") "router") $tls.clientCaSecret -}}
metadata:
  labels:
    {{- include "headrace.labels" . | nindent 4 }}
    {{- range $key, $value := merge (.labels | default dict) ($pod.podLabels | default dict) }}
    {{ $key }}: {{ $value | quote }}
    {{- end }}
  annotations:
    {{- if .config }}
    checksum/config: {{ include "headrace.config" $root | sha256sum }}
    {{- end }}
    kubectl.kubernetes.io/default-container: {{ .component }}
    {{- range $key, $value := $pod.podAnnotations }}
    {{ $key }}: {{ $value | quote }}
    {{- end }}
spec:
  {{- /* KubeRay gives a head with an autoscaler an account of its own */}}
  {{- if not .ownAccount }}
  serviceAccountName: {{ include "headrace.serviceAccount" $root }}
  automountServiceAccountToken: false
  {{- end }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .graceSeconds | default 30 }}
  {{- with $pod.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $pod.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- if $pod.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- range $key := list "nodeSelector" "affinity" "tolerations" }}
  {{- with index $pod $key }}
  {{ $key }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  topologySpreadConstraints:
    {{- if $pod.topologySpreadConstraints }}
    {{- toYaml $pod.topologySpreadConstraints | nindent 4 }}
    {{- else }}
    {{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
    - topologyKey: {{ $key }}
      maxSkew: 1
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "headrace.selector" $ | nindent 10 }}
    {{- end }}
    {{- end }}
  {{- if and .model $root.Values.model.fetch }}
  initContainers:
    - name: fetch-model
      image: {{ include "headrace.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: [headrace, model, fetch]
      args:
        - {{ $root.Values.model.source | quote }}
        - --to={{ include "headrace.modelFolder" $root }}
        - --json
      securityContext:
        {{- include "headrace.containerSecurity" . | nindent 8 }}
      env:
        {{- include "headrace.commonEnv" . | nindent 8 }}
        {{- with $root.Values.model.hubToken.existingSecret }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ . }}, key: {{ $root.Values.model.hubToken.key }}}
        {{- end }}
      resources:
        requests: {cpu: 500m, memory: 1Gi}
        limits: {memory: 2Gi}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: models, mountPath: /models}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ .image | default (include "headrace.image" $root) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      {{- .container | nindent 6 }}
      securityContext:
        {{- include "headrace.containerSecurity" . | nindent 8 }}
      env:
        {{- include "headrace.commonEnv" . | nindent 8 }}
        {{- if .config }}
        {{- include "headrace.redisEnv" $root | nindent 8 }}
        {{- end }}
        {{- with .env }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $pod.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      resources:
        {{- toYaml .resources | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if .config }}
        - {name: config, mountPath: /etc/headrace/headrace.yaml, subPath: headrace.yaml, readOnly: true}
        {{- end }}
        {{- if .model }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if $pod.kernelCacheClaim }}
        - {name: kernels, mountPath: /kernels}
        {{- end }}
        {{- if .sharedMemory }}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- end }}
        {{- if .keys }}
        - {name: api-keys, mountPath: /etc/headrace/keys, readOnly: true}
        {{- end }}
        {{- if .tenants }}
        - {name: tenant-keys, mountPath: /etc/headrace/tenants, readOnly: true}
        {{- end }}
        {{- if $tlsFiles }}
        - {name: tls, mountPath: /etc/headrace/tls, readOnly: true}
        {{- end }}
        {{- if $clientCa }}
        - {name: client-ca, mountPath: /etc/headrace/client-ca, readOnly: true}
        {{- end }}
        {{- if and .config $root.Values.redis.external.caSecret }}
        - {name: redis-ca, mountPath: /etc/headrace/redis, readOnly: true}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    {{- if .config }}
    - name: config
      configMap: {name: {{ include "headrace.name" $root }}}
    {{- end }}
    {{- if .model }}
    - name: models
      {{- include "headrace.modelVolume" $root | nindent 6 }}
    {{- end }}
    {{- with $pod.kernelCacheClaim }}
    - name: kernels
      persistentVolumeClaim: {claimName: {{ . }}}
    {{- end }}
    {{- with .sharedMemory }}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ . }}}
    {{- end }}
    {{- with .keys }}
    - name: api-keys
      secret: {secretName: {{ .existingSecret }}, items: [{key: {{ .key }}, path: keys}]}
    {{- end }}
    {{- with .tenants }}
    - name: tenant-keys
      secret: {secretName: {{ . }}}
    {{- end }}
    {{- if $tlsFiles }}
    - name: tls
      secret:
        secretName: {{ $tls.existingSecret }}
        items:
          {{- range $tlsFiles }}
          - {key: {{ . }}, path: {{ . }}}
          {{- end }}
    {{- end }}
    {{- if $clientCa }}
    - name: client-ca
      secret: {secretName: {{ $tls.clientCaSecret }}, items: [{key: ca.crt, path: ca.crt}]}
    {{- end }}
    {{- if .config }}
    {{- with $root.Values.redis.external.caSecret }}
    - name: redis-ca
      secret: {secretName: {{ . }}}
    {{- end }}
    {{- end }}
{{- end -}}

{{- define "headrace.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* The root file system is read-only: what writes does so under /tmp. */}}
{{- define "headrace.commonEnv" -}}
- {name: HOME, value: /tmp}
- {name: HF_HOME, value: /tmp/hub}
- {name: TRITON_CACHE_DIR, value: {{ ternary "/kernels" "/tmp/triton" (ne (.settings.kernelCacheClaim | default "") "") }}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- end -}}

{{/* The URL is no argument's text: it may hold a password. */}}
{{- define "headrace.redisEnv" -}}
- name: HEADRACE_REDIS_URL
  {{- with .Values.redis.external }}
  {{- if eq $.Values.redis.mode "internal" }}
  value: redis://{{ include "headrace.name" $ }}-redis:6379/0
  {{- else if .existingSecret }}
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret }}, key: {{ .key }}}
  {{- else }}
  value: {{ .url | quote }}
  {{- end }}
  {{- end }}
{{- end -}}

{{- define "headrace.podIpEnv" -}}
- name: HEADRACE_HOST
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
{{- end -}}

{{- define "headrace.modelVolume" -}}
{{- $volume := .Values.model.volume -}}
{{- if eq $volume.kind "claim" -}}
persistentVolumeClaim: {claimName: {{ include "headrace.modelClaim" . }}}
{{- else if eq $volume.kind "hostPath" -}}
hostPath: {path: {{ $volume.hostPath }}, type: DirectoryOrCreate}
{{- else -}}
emptyDir: {sizeLimit: {{ $volume.size }}}
{{- end -}}
{{- end -}}
