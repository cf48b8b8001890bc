#!/bin/sh
# Plans a step for a machine that no file describes: an H200 node whose links are half as fast. Writes two files here.
set -eu

counterpoint machines h200 -o template.toml >/dev/null
sed -e 's/^name = .*/name = "half_links"/' \
    -e 's/^title = .*/title = "8 x NVIDIA H200, NVLinks at half the rate"/' \
    -e '/^\[link\]/,/^\[network\]/s/^bytes_per_s = .*/bytes_per_s = 2.25e11/' \
    -e '/^\[link\]/,/^\[network\]/s/^per_peer_bytes_per_s = .*/per_peer_bytes_per_s = 2.25e11/' \
    -e 's/^"link.bytes_per_s" = .*/"link.bytes_per_s" = "assumed: half of an H200"/' \
    template.toml >half_links.toml

counterpoint tune cb_ar_opt2 --machine half_links.toml
