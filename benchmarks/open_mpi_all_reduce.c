// Times MPI_Allreduce of float32 as timed_in_turns() of common.py times a call: the second of two.
//
//     mpirun -np 2 open_mpi_all_reduce KIB REPEATS [KIB REPEATS ...]
//
// Rank 0 prints a line for each size: KiB, median and smallest seconds.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int by_size(const void* left, const void* right) {
  const double difference = *(const double*)left - *(const double*)right;
  return (difference > 0) - (difference < 0);
}

int main(int argc, char** argv) {
  enum { kWarmUp = 2 };
  int rank = 0;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  for (int i = 1; i + 1 < argc; i += 2) {
    const int numel = 256 * atoi(argv[i]), repeats = atoi(argv[i + 1]);
    float* values = calloc(numel, sizeof *values);
    double* seconds = malloc(repeats * sizeof *seconds);
    for (int turn = 0; turn < kWarmUp + repeats; ++turn) {
      MPI_Allreduce(MPI_IN_PLACE, values, numel, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      const double start = MPI_Wtime();
      MPI_Allreduce(MPI_IN_PLACE, values, numel, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      if (turn >= kWarmUp) seconds[turn - kWarmUp] = MPI_Wtime() - start;
    }
    qsort(seconds, repeats, sizeof *seconds, by_size);
    const double middle = (seconds[(repeats - 1) / 2] + seconds[repeats / 2]) / 2;
    if (rank == 0) printf("%s %.9f %.9f\n", argv[i], middle, seconds[0]);
    free(seconds);
    free(values);
  }
  MPI_Finalize();
  return 0;
}
