// Empty: see cuda_runtime.h beside it.
#pragma once
