// Muster: distributed training for C++. This header brings all of it but muster/comm/objects.h, muster/rpc/,
// muster/autograd/, muster/optim/distributed_optimizer.h and muster/remote/, which need msgpack-cxx.
#pragma once

#include "muster/base/error.h"
#include "muster/checkpoint/snapshot.h"
#include "muster/checkpoint/stop_signal.h"
#include "muster/comm/collectives.h"
#include "muster/comm/fault_plan.h"
#include "muster/comm/functional.h"
#include "muster/comm/report_progress.h"
#include "muster/comm/world.h"
#include "muster/data/sampler.h"
#include "muster/launch/spawn.h"
#include "muster/parallel/ddp.h"
#include "muster/store/store.h"
