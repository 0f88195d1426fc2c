// The training of main.cpp for ranks that come and go: muster run -n 2 --max-restarts 9 fashion_mnist --elastic
#pragma once

#include "flags.h"

void run_elastic(const Flags& flags);
