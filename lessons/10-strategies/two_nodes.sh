#!/bin/bash
# Two nodes with one rank each, which this machine simulates: two torchruns, as on a cluster.
#     bash lessons/10-strategies/two_nodes.sh scripts/PTL_NodeBatch.py
port=$(python -c "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])")
node="torchrun --nnodes=2 --nproc-per-node=1 --local-addr=127.0.0.1"
node+=" --master-addr=127.0.0.1 --master-port=$port"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# If node 0 ends first, node 1 reports a lost connection, which is harmless.
$node --node-rank=1 "$@" 2>/dev/null &
$node --node-rank=0 "$@" && wait $!
