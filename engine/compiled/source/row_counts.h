// From a row count known when a tile is computed to a function that was compiled for it, its sums in registers.

#define HEADLONG_ROW_COUNTS_5(name, rows_of, Weights, Inputs, Results)                                     \
  inline void name(Weights weights, Inputs inputs, int32_t k, int32_t count, Results results) {            \
    switch (count) {                                                                                       \
      case 1: return rows_of<1>(weights, inputs, k, results);                                              \
      case 2: return rows_of<2>(weights, inputs, k, results);                                              \
      case 3: return rows_of<3>(weights, inputs, k, results);                                              \
      case 4: return rows_of<4>(weights, inputs, k, results);                                              \
      default: return rows_of<5>(weights, inputs, k, results);                                             \
    }                                                                                                      \
  }

#define HEADLONG_ROW_COUNTS_16(name, rows_of, Weights, Inputs, Results)                                    \
  inline void name(Weights weights, Inputs inputs, int32_t k, int32_t count, Results results) {            \
    switch (count) {                                                                                       \
      case 1: return rows_of<1>(weights, inputs, k, results);                                              \
      case 2: return rows_of<2>(weights, inputs, k, results);                                              \
      case 3: return rows_of<3>(weights, inputs, k, results);                                              \
      case 4: return rows_of<4>(weights, inputs, k, results);                                              \
      case 5: return rows_of<5>(weights, inputs, k, results);                                              \
      case 6: return rows_of<6>(weights, inputs, k, results);                                              \
      case 7: return rows_of<7>(weights, inputs, k, results);                                              \
      case 8: return rows_of<8>(weights, inputs, k, results);                                              \
      case 9: return rows_of<9>(weights, inputs, k, results);                                              \
      case 10: return rows_of<10>(weights, inputs, k, results);                                            \
      case 11: return rows_of<11>(weights, inputs, k, results);                                            \
      case 12: return rows_of<12>(weights, inputs, k, results);                                            \
      case 13: return rows_of<13>(weights, inputs, k, results);                                            \
      case 14: return rows_of<14>(weights, inputs, k, results);                                            \
      case 15: return rows_of<15>(weights, inputs, k, results);                                            \
      default: return rows_of<16>(weights, inputs, k, results);                                            \
    }                                                                                                      \
  }
