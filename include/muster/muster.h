// Muster: distributed training for C++. This header includes what data-parallel training needs: World, collectives,
// DistributedDataParallel, FullyShardedDataParallel, samplers, streams and loaders, snapshots, spawn() and the store.
// Include separately
//   - what needs msgpack-cxx: muster/comm/objects.h, muster/rpc/, muster/remote/, and transform.h, meta.h, implicit.h,
//     zero_order.h, make_dot.h and distributed_optimizer.h in muster/optim/;
//   - muster/autograd/, the rest of muster/optim/ and muster/parallel/, muster/train/, muster/data/idx.h,
//     muster/launch/launcher.h; and, for what speaks c10d, muster/comm/process_group.h and muster/store/c10d_store.h.
#pragma once

#include "muster/base/error.h"
#include "muster/checkpoint/checkpoint.h"
#include "muster/checkpoint/safetensors.h"
#include "muster/checkpoint/snapshot.h"
#include "muster/checkpoint/stop_signal.h"
#include "muster/comm/collectives.h"
#include "muster/comm/fault_plan.h"
#include "muster/comm/functional.h"
#include "muster/comm/report_progress.h"
#include "muster/comm/spawn.h"
#include "muster/comm/world.h"
#include "muster/data/bucket_sampler.h"
#include "muster/data/even_batches.h"
#include "muster/data/ledger.h"
#include "muster/data/prefetch_loader.h"
#include "muster/data/sampler.h"
#include "muster/data/sharded_source.h"
#include "muster/data/stream.h"
#include "muster/data/weighted_sampler.h"
#include "muster/parallel/activation_checkpoint.h"
#include "muster/parallel/averaged_model.h"
#include "muster/parallel/comm_hooks.h"
#include "muster/parallel/ddp.h"
#include "muster/parallel/fsdp.h"
#include "muster/parallel/hogwild.h"
#include "muster/parallel/model_averager.h"
#include "muster/parallel/on_meta.h"
#include "muster/parallel/post_local_sgd_optimizer.h"
#include "muster/parallel/sync_batch_norm.h"
#include "muster/parallel/token_scale.h"
#include "muster/parallel/zero_redundancy_optimizer.h"
#include "muster/store/store.h"
