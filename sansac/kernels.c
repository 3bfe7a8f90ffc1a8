/* Fused multi-step spiking neurons: forward, and backward through time. At the end, by the same
 * means, the quantile Huber loss of truncated quantile critics; and for a CPU, which is short of
 * memory bandwidth where a GPU is not, LayerNorm with its ReLU in one pass,
 * and one action of a policy in one call.
 *
 * One source for two compilers. A C compiler sees `real` as a SIMD vector of neurons and a kernel
 * as a function that walks over them; NVRTC sees `real` as a float and a kernel as one thread a
 * neuron. The arithmetic is the same text for both, in the order of SpikingJelly's reference; built
 * without contraction and fast-math, its spikes are equal to the bit. No header is needed.
 *
 * Layout: currents, outputs and their gradients are [time_steps, size], or [size] where they do not
 * depend on time, row-major, in float32 or bfloat16. State is float32 and lives in registers. */

#ifdef __CUDACC__

typedef float real;
typedef unsigned bits;
typedef unsigned short halves;
#define LANES 1
#define FUNCTION static __device__ __forceinline__
#define KERNEL extern "C" __global__ void
#define BITS(x) __float_as_uint(x)
#define REAL(b) __uint_as_float(b)
#define MASK(condition) (-(unsigned)(condition))
#define CONVERT(x, type) ((type)(x))
#define READ(x, from, lanes) (x = *(from))
#define WRITE(x, to, lanes) (*(to) = x)
#define GROUPS 1
#define EACH_BLOCK(size, threads, call) \
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < size; \
         i += (long long)gridDim.x * blockDim.x) { \
        const int groups = 1, lanes = 1; \
        call; \
    }
extern __shared__ float shared[]; /* [time_steps, blockDim.x] */
#define TAPE(name, steps) float *name = shared + threadIdx.x
#define AT(name, t, k) name[(t) * blockDim.x]

#else

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float real __attribute__((vector_size(4 * LANES)));
typedef unsigned bits __attribute__((vector_size(4 * LANES)));
typedef unsigned short halves __attribute__((vector_size(2 * LANES)));
#define FUNCTION static inline __attribute__((always_inline))
#define KERNEL void
#define BITS(x) ((bits)(x))
#define REAL(b) ((real)(b))
#define MASK(condition) ((bits)(condition))
#define CONVERT(x, type) __builtin_convertvector(x, type)
#define READ(x, from, lanes) __builtin_memcpy(&x, from, (lanes) * sizeof *(from))
#define WRITE(x, to, lanes) __builtin_memcpy(to, &x, (lanes) * sizeof *(to))
#define PRAGMA(text) _Pragma(#text)
/* A step is taken by several groups before the next one: their rows are read in longer pieces, and
 * none waits for another's arithmetic. Constant numbers of groups and lanes stay in registers. */
#define GROUPS 4
#define EACH_BLOCK(size, threads, call) \
    PRAGMA(omp parallel for num_threads(threads) if(threads > 1)) \
    for (long long block = 0; block < size / (GROUPS * LANES); ++block) { \
        const long long i = block * (GROUPS * LANES); \
        const int groups = GROUPS, lanes = LANES; \
        call; \
    } \
    for (long long i = size - size % (GROUPS * LANES); i < size; i += LANES) { \
        const int groups = 1, lanes = size - i < LANES ? (int)(size - i) : LANES; \
        call; \
    }
#define TAPE(name, steps) real name[steps][GROUPS]
#define AT(name, t, k) name[t][k]

#endif

enum { RECTANGLE, TRIANGLE, ATAN, SIGMOID, FAST_SIGMOID };
enum { SPIKES, MEAN, VOLTAGES };

/* Only 4-byte fields, so that both compilers lay it out alike; passed by value to both. */
struct neuron {
    int time_steps, constant, output, bfloat16; /* constant: the current does not depend on time */
    int current_based, decay_input, decay_multiplies, detach_reset, surrogate;
    float decay; /* LIF: tau, or 1/tau where decay_multiplies; current-based LIF: v_decay */
    float current_decay, threshold, reset;
    float alpha, scale; /* scale: the constant that the surrogate derives from alpha */
};

/* a where the mask is all ones, b where it is 0. */
FUNCTION real select(bits mask, real a, real b) {
    return REAL((mask & BITS(a)) | (~mask & BITS(b)));
}

FUNCTION real load(const void *from, long long i, int lanes, int bfloat16) {
    if (bfloat16) {
        halves h = {0};
        READ(h, (const unsigned short *)from + i, lanes);
        return REAL(CONVERT(h, bits) << 16);
    }
    real x = {0};
    READ(x, (const float *)from + i, lanes);
    return x;
}

FUNCTION void store(void *to, long long i, int lanes, int bfloat16, real x) {
    if (bfloat16) { /* round to nearest, ties to even; a NaN stays one */
        const bits nan = MASK(x != x), rounded = (BITS(x) + 0x7fffu + ((BITS(x) >> 16) & 1u)) >> 16;
        const halves h = CONVERT((nan & 0x7fc0u) | (~nan & rounded), halves);
        WRITE(h, (unsigned short *)to + i, lanes);
    } else {
        WRITE(x, (float *)to + i, lanes);
    }
}

/* ---- the surrogate's derivative at u = voltage - threshold -------------------------------- */

#define INFINITE (1e38f * 1e38f)
#define ROUND 12582912.0f /* 1.5 * 2^23: adding it rounds to an integer, left in the lower bits */

/* exp(x) to about one unit in the last place: x = n ln 2 + r, |r| <= ln 2 / 2, exp(x) = 2^n exp(r).
 * Stays at exp(-87) below -87, and is infinite above 88.37, where 2^n ends. */
FUNCTION real exponential(real x) {
    const real zero = {0};
    const bits overflow = MASK(x > 88.37f);
    x = select(MASK(x < -87.0f), zero - 87.0f, x);
    const real shifted = x * 1.44269504f + ROUND, n = shifted - ROUND;
    const real r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    real p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = ((p * r) * r + r) + 1.0f;
    return select(overflow, zero + INFINITE, REAL(BITS(p) + (BITS(shifted) << 23)));
}

FUNCTION real surrogate(struct neuron p, real u) {
    const real zero = {0}, distance = REAL(BITS(u) & 0x7fffffffu);
    real z;
    switch (p.surrogate) {
    case RECTANGLE:
        return select(MASK(distance < p.scale), zero + p.alpha, zero);
    case TRIANGLE:
        z = p.alpha - p.scale * distance;
        return select(MASK(z < 0.0f), zero, z);
    case ATAN:
        z = u * p.scale; /* below as torch divides a number by a tensor: a reciprocal first */
        return 1.0f / (1.0f + z * z) * (p.alpha * 0.5f);
    case SIGMOID:
        z = 1.0f / (1.0f + exponential(zero - p.alpha * u));
        return (1.0f - z) * z * p.alpha;
    default: /* FAST_SIGMOID */
        z = 1.0f + distance;
        return 1.0f / (z * z) * p.alpha;
    }
}

/* ---- one step of a group of neurons ------------------------------------------------------- */

FUNCTION real leak(struct neuron p, real x) {
    return p.decay_multiplies ? x * p.decay : x / p.decay;
}

/* The voltage before fire and reset. */
FUNCTION real charge(struct neuron p, real x, real v, real *current) {
    if (p.current_based) {
        *current = *current * p.current_decay + x;
        return v * p.decay + *current;
    }
    if (p.decay_input) return v + leak(p, x - (v - p.reset));
    return v - leak(p, v - p.reset) + x;
}

/* All ones where the charged voltage reaches the threshold, else 0; 0 for NaN. */
FUNCTION bits fire(struct neuron p, real h) { return MASK(h >= p.threshold); }

/* Equals spike * reset + (1 - spike) * h, in which an infinite voltage that fires leaves a NaN. */
FUNCTION real reset(struct neuron p, real h, bits fired) {
    return select(fired, h * 0.0f + p.reset, h);
}

/* Learned values are read where they live, so that a GPU need not be waited for. */
FUNCTION struct neuron with_learned(struct neuron p, const float *decay, const float *threshold) {
    if (decay) p.decay = *decay, p.decay_multiplies = 1;
    if (threshold) p.threshold = *threshold;
    return p;
}

/* ---- through time ------------------------------------------------------------------------- */

FUNCTION void forward(struct neuron p, const void *currents, void *output, long long size,
                      long long i, int groups, int lanes) {
    const real zero = {0};
    real x[GROUPS], v[GROUPS], current[GROUPS], spikes[GROUPS];
    for (int k = 0; k < groups; ++k) {
        v[k] = zero + p.reset;
        x[k] = current[k] = spikes[k] = zero;
    }
    for (int t = 0; t < p.time_steps; ++t)
        for (int k = 0; k < groups; ++k) {
            const long long at = t * size + i + k * LANES;
            if (t == 0 || !p.constant) x[k] = load(currents, at, lanes, p.bfloat16);
            const real h = charge(p, x[k], v[k], &current[k]);
            const bits fired = fire(p, h);
            const real spike = select(fired, zero + 1.0f, zero);
            v[k] = reset(p, h, fired);
            if (p.output == MEAN)
                spikes[k] = spikes[k] + spike;
            else
                store(output, at, lanes, p.bfloat16, p.output == SPIKES ? spike : h);
        }
    if (p.output == MEAN)
        for (int k = 0; k < groups; ++k)
            store(output, i + k * LANES, lanes, p.bfloat16, spikes[k] / (float)p.time_steps);
}

/* Charged voltages h are computed again rather than kept: reading the currents costs what reading
 * h would, and the forward pass then writes nothing but its output. With g the gradient of the
 * output, c that of the voltage after reset and s' the surrogate's derivative, the gradient
 *     of the spike    d = g - c h + c reset          g alone with detach_reset
 *     of h            d s' + c (1 - spike)           and g where voltages are the output
 * goes on to x, to v one step earlier and to what is learned. A constant current gets the sum over
 * time; learned values get one sum a neuron ([size], float32), which the caller adds up. */
FUNCTION void backward(struct neuron p, const void *currents, const void *gradient,
                       void *current_gradient, float *decay_gradient, float *threshold_gradient,
                       long long size, long long i, int groups, int lanes) {
    const real zero = {0};
    real x[GROUPS], v[GROUPS], current[GROUPS], g[GROUPS];
    real to_v[GROUPS], to_current[GROUPS], sum[GROUPS], to_decay[GROUPS], to_threshold[GROUPS];
    TAPE(voltages, p.time_steps);
    for (int k = 0; k < groups; ++k) {
        v[k] = zero + p.reset;
        x[k] = current[k] = g[k] = zero;
        to_v[k] = to_current[k] = sum[k] = to_decay[k] = to_threshold[k] = zero;
        if (p.output == MEAN)
            g[k] = load(gradient, i + k * LANES, lanes, p.bfloat16) / (float)p.time_steps;
    }
    for (int t = 0; t < p.time_steps; ++t)
        for (int k = 0; k < groups; ++k) {
            const long long at = t * size + i + k * LANES;
            if (t == 0 || !p.constant) x[k] = load(currents, at, lanes, p.bfloat16);
            const real h = charge(p, x[k], v[k], &current[k]);
            AT(voltages, t, k) = h;
            v[k] = reset(p, h, fire(p, h));
        }
    for (int t = p.time_steps - 1; t >= 0; --t)
        for (int k = 0; k < groups; ++k) {
            const long long at = t * size + i + k * LANES;
            const real h = AT(voltages, t, k), slope = surrogate(p, h - p.threshold);
            if (p.output != MEAN) g[k] = load(gradient, at, lanes, p.bfloat16);
            real to_spike = p.output == VOLTAGES ? zero : g[k];
            if (!p.detach_reset) to_spike = (to_spike - to_v[k] * h) + to_v[k] * p.reset;
            real to_h = to_spike * slope + select(fire(p, h), zero, to_v[k]), to_x;
            if (p.output == VOLTAGES) to_h = to_h + g[k];
            if (threshold_gradient) to_threshold[k] = to_threshold[k] - to_spike * slope;
            if (p.current_based) {
                to_x = to_h + to_current[k];
                to_current[k] = to_x * p.current_decay;
                to_v[k] = to_h * p.decay;
            } else {
                const real leaked = leak(p, to_h);
                to_x = p.decay_input ? leaked : to_h;
                to_v[k] = to_h - leaked;
                if (decay_gradient) {
                    const real before = t ? AT(voltages, t - 1, k) : zero + p.reset;
                    const real from = t ? reset(p, before, fire(p, before)) : before;
                    if (p.decay_input && !p.constant)
                        x[k] = load(currents, at, lanes, p.bfloat16);
                    to_decay[k] =
                        to_decay[k] + to_h * ((p.decay_input ? x[k] : zero) - (from - p.reset));
                }
            }
            if (p.constant)
                sum[k] = sum[k] + to_x;
            else
                store(current_gradient, at, lanes, p.bfloat16, to_x);
        }
    for (int k = 0; k < groups; ++k) {
        const long long at = i + k * LANES;
        if (p.constant) store(current_gradient, at, lanes, p.bfloat16, sum[k]);
        if (decay_gradient) WRITE(to_decay[k], decay_gradient + at, lanes);
        if (threshold_gradient) WRITE(to_threshold[k], threshold_gradient + at, lanes);
    }
}

KERNEL neuron_forward(struct neuron given, const void *currents, const float *decay,
                      const float *threshold, void *output, long long size, long long threads) {
    const struct neuron p = with_learned(given, decay, threshold);
    EACH_BLOCK(size, threads, forward(p, currents, output, size, i, groups, lanes))
}

KERNEL neuron_backward(struct neuron given, const void *currents, const float *decay,
                       const float *threshold, const void *gradient, void *current_gradient,
                       float *decay_gradient, float *threshold_gradient, long long size,
                       long long threads) {
    const struct neuron p = with_learned(given, decay, threshold);
    EACH_BLOCK(size, threads, backward(p, currents, gradient, current_gradient, decay_gradient,
                                       threshold_gradient, size, i, groups, lanes))
}

/* ---- quantile Huber loss -------------------------------------------------------------------- */

/* d = target - prediction: the loss w huber(d), w = |level - (d < 0)|, and w clip(d, -1, 1), its
 * negative derivative, added up. */
FUNCTION void huber(real d, real level, real *sum, real *push) {
    const real zero = {0}, one = zero + 1.0f;
    const real clipped = select(MASK(d > one), one, select(MASK(d < -one), -one, d));
    const real weighted = select(MASK(d < zero), one - level, level) * clipped;
    *sum = *sum + weighted * (d - 0.5f * clipped);
    *push = *push + weighted;
}

/* Predictions [copies, samples, quantiles] and targets [samples, atoms]; loss and slope are a
 * prediction's, summed over the atoms. On a CPU lanes are samples, so that all of them share a
 * quantile and an atom; quantiles are taken GROUPS at a time. */
#ifdef __CUDACC__
FUNCTION void one_prediction(const float *predictions, const float *targets, float *loss,
                             float *slope, long long samples, long long quantiles,
                             long long atoms, long long i) {
    const float level = (i % quantiles + 0.5f) / quantiles;
    const float *row = targets + i / quantiles % samples * atoms;
    loss[i] = slope[i] = 0.0f;
    for (int atom = 0; atom < atoms; ++atom)
        huber(row[atom] - predictions[i], level, loss + i, slope + i);
}

KERNEL quantile_huber(const float *predictions, const float *targets, float *loss, float *slope,
                      long long copies, long long samples, long long quantiles, long long atoms,
                      long long threads) {
    EACH_BLOCK(copies * samples * quantiles, threads,
               one_prediction(predictions, targets, loss, slope, samples, quantiles, atoms, i))
}
#else
FUNCTION void gather(const float *from, long long stride, int lanes, real *x) {
    float lane[LANES] = {0};
    for (int k = 0; k < lanes; ++k) lane[k] = from[k * stride];
    READ(*x, lane, LANES);
}

FUNCTION void scatter(real x, float *to, long long stride, int lanes) {
    float lane[LANES];
    WRITE(x, lane, LANES);
    for (int k = 0; k < lanes; ++k) to[k * stride] = lane[k];
}

KERNEL quantile_huber(const float *predictions, const float *targets, float *loss, float *slope,
                      long long copies, long long samples, long long quantiles, long long atoms,
                      long long threads) {
    const real zero = {0};
    PRAGMA(omp parallel for num_threads(threads) if(threads > 1))
    for (long long sample = 0; sample < samples; sample += LANES) {
        const int lanes = samples - sample < LANES ? (int)(samples - sample) : LANES;
        real column[atoms];
        for (int atom = 0; atom < atoms; ++atom)
            gather(targets + sample * atoms + atom, atoms, lanes, column + atom);
        for (long long copy = 0; copy < copies; ++copy)
            for (long long first = 0; first < quantiles; first += GROUPS) {
                const long long i = (copy * samples + sample) * quantiles + first;
                const int groups = quantiles - first < GROUPS ? (int)(quantiles - first) : GROUPS;
                real prediction[GROUPS], level[GROUPS], sum[GROUPS], push[GROUPS];
                for (int k = 0; k < GROUPS; ++k) {
                    gather(predictions + i + (k < groups ? k : 0), quantiles, lanes, prediction + k);
                    level[k] = zero + (first + k + 0.5f) / quantiles;
                    sum[k] = push[k] = zero;
                }
                for (int atom = 0; atom < atoms; ++atom)
                    for (int k = 0; k < GROUPS; ++k)
                        huber(column[atom] - prediction[k], level[k], sum + k, push + k);
                for (int k = 0; k < groups; ++k) {
                    scatter(sum[k], loss + i + k, quantiles, lanes);
                    scatter(push[k], slope + i + k, quantiles, lanes);
                }
            }
    }
}

/* The `kept` smallest of a sample's values over all copies, [copies, samples, quantiles] to
 * [samples, kept], in no order: a bubble carries the largest up and out, as often as one goes. */
KERNEL lowest(const float *values, float *out, long long copies, long long samples,
              long long quantiles, long long kept) {
    const long long count = copies * quantiles;
    for (long long sample = 0; sample < samples; sample += LANES) {
        const int lanes = samples - sample < LANES ? (int)(samples - sample) : LANES;
        real x[count];
        for (long long copy = 0; copy < copies; ++copy)
            for (long long q = 0; q < quantiles; ++q)
                gather(values + (copy * samples + sample) * quantiles + q, quantiles, lanes,
                       x + copy * quantiles + q);
        for (long long end = count; end > kept; --end)
            for (long long j = 0; j + 1 < end; ++j) {
                const bits above = MASK(x[j] > x[j + 1]);
                const real low = select(above, x[j + 1], x[j]);
                x[j + 1] = select(above, x[j], x[j + 1]);
                x[j] = low;
            }
        for (long long k = 0; k < kept; ++k)
            scatter(x[k], out + sample * kept + k, kept, lanes);
    }
}
#endif

#ifndef __CUDACC__

/* ---- one action ----------------------------------------------------------------------------- */

/* currents[t] = bias + inputs[t] weight, over `steps` steps; weight is [inputs, outputs]. A row of it
 * is read once for all steps, and not at all where nothing comes in: no spike, or a ReLU's zero. */
FUNCTION void product(const float *input, const float *weight, const float *bias, float *currents,
                      long long steps, long long inputs, long long outputs) {
    for (long long t = 0; t < steps; ++t)
        __builtin_memcpy(currents + t * outputs, bias, outputs * sizeof *bias);
    for (long long i = 0; i < inputs; ++i)
        for (long long t = 0; t < steps; ++t) {
            const float x = input[t * inputs + i], *row = weight + i * outputs;
            float *sum = currents + t * outputs;
            if (x == 0.0f) continue;
            PRAGMA(omp simd)
            for (long long j = 0; j < outputs; ++j) sum[j] += x * row[j];
        }
}

/* The mean before the tanh for one observation [widths[0]], clipped to [-clip, clip] after
 * (observation - centre) * scale. Layer l has weights [widths[l], widths[l + 1]]; all but the last
 * end in neurons, or in ReLU where `neurons` is null. `x` and `currents` hold a layer's values at
 * all time steps. */
KERNEL action_mean(const float *observation, const float *centre, const float *scale, float clip,
                   const struct neuron *neurons, const float *const *weights,
                   const float *const *biases, const long long *widths, long long layers, float *x,
                   float *currents, float *mean) {
    for (long long i = 0; i < widths[0]; ++i) {
        const float normed = (observation[i] - centre[i]) * scale[i];
        x[i] = normed < -clip ? -clip : normed > clip ? clip : normed;
    }
    for (long long l = 0; l < layers; ++l) {
        const long long width = widths[l + 1], last = l == layers - 1;
        const long long steps = !neurons || l == 0 || last ? 1 : neurons[l].time_steps;
        product(x, weights[l], biases[l], last ? mean : currents, steps, widths[l], width);
        if (last) return;
        if (neurons) {
            neuron_forward(neurons[l], currents, 0, 0, x, width, 1);
            continue;
        }
        PRAGMA(omp simd)
        for (long long j = 0; j < width; ++j) x[j] = currents[j] < 0.0f ? 0.0f : currents[j];
    }
}

/* ---- LayerNorm and ReLU --------------------------------------------------------------------- */

/* A row of `width`, a vector at a time. Sums are kept in GROUPS parts, part k here, and rows are
 * taken ROWS at a time, so that an addition need not wait for the one before it. */
#define ROWS 4
#define EACH_VECTOR(width, body) \
    { \
        long long i = 0; \
        for (; i + GROUPS * LANES <= width;) \
            for (int k = 0; k < GROUPS; ++k, i += LANES) { \
                const int lanes = LANES; \
                body \
            } \
        for (int k = 0; i < width; k = (k + 1) % GROUPS, i += LANES) { \
            const int lanes = width - i < LANES ? (int)(width - i) : LANES; \
            body \
        } \
    }

FUNCTION float total(const real *parts) {
    const real sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    float lane[LANES];
    WRITE(sum, lane, LANES);
    for (int half = LANES / 2; half; half /= 2)
        for (int k = 0; k < half; ++k) lane[k] += lane[k + half];
    return lane[0];
}

/* y = max(0, x^ gain + bias), x^ = (x - mean) / sqrt(variance + epsilon) over a row. */
FUNCTION void norm_relu(const float *x, const float *gain, const float *bias, float *y,
                        float *statistics, float epsilon, long long width, int rows) {
    const real zero = {0};
    float mean[ROWS], factor[ROWS];
    for (int r = 0; r < rows; ++r) {
        const float *in = x + r * width;
        real sum[GROUPS] = {{0}};
        EACH_VECTOR(width, sum[k] = sum[k] + load(in, i, lanes, 0);)
        mean[r] = total(sum) / width;
    }
    for (int r = 0; r < rows; ++r) {
        const float *in = x + r * width;
        real squares[GROUPS] = {{0}};
        EACH_VECTOR(width, const real d = load(in, i, lanes, 0) - mean[r];
                    real within = zero; /* past the end of a row there is nothing to count */
                    WRITE(d, (float *)&within, lanes);
                    squares[k] = squares[k] + within * within;)
        factor[r] = 1.0f / __builtin_sqrtf(total(squares) / width + epsilon);
    }
    for (int r = 0; r < rows; ++r) {
        const float *in = x + r * width;
        float *out = y + r * width;
        EACH_VECTOR(width, const real normed = (load(in, i, lanes, 0) - mean[r]) * factor[r];
                    const real h = normed * load(gain, i, lanes, 0) + load(bias, i, lanes, 0);
                    const real rectified = select(MASK(h < zero), zero, h); /* a NaN passes */
                    WRITE(rectified, out + i, lanes);)
        statistics[2 * r] = mean[r], statistics[2 * r + 1] = factor[r];
    }
}

/* With d the gradient of y where y > 0, else 0: bias gets sum d, gain sum d x^, and
 * x gets factor (e - mean(e) - x^ mean(e x^)), e = d gain. Gain and bias may ask for none. */
FUNCTION void norm_relu_back(const float *x, const float *gain, const float *y,
                             const float *statistics, const float *gradient, float *x_gradient,
                             float *gain_gradient, float *bias_gradient, long long width,
                             int rows) {
    const real zero = {0};
    float e_mean[ROWS], e_moment[ROWS];
    for (int r = 0; r < rows; ++r) {
        const float *in = x + r * width, *out = y + r * width, *from = gradient + r * width;
        const float mean = statistics[2 * r], factor = statistics[2 * r + 1];
        real sum[GROUPS] = {{0}}, moment[GROUPS] = {{0}};
        EACH_VECTOR(width, const real normed = (load(in, i, lanes, 0) - mean) * factor;
                    const bits passed = MASK(load(out, i, lanes, 0) > zero);
                    const real d = select(passed, load(from, i, lanes, 0), zero);
                    const real e = d * load(gain, i, lanes, 0);
                    sum[k] = sum[k] + e;
                    moment[k] = moment[k] + e * normed;
                    if (gain_gradient) {
                        const real to_gain = load(gain_gradient, i, lanes, 0) + d * normed;
                        const real to_bias = load(bias_gradient, i, lanes, 0) + d;
                        WRITE(to_gain, gain_gradient + i, lanes);
                        WRITE(to_bias, bias_gradient + i, lanes);
                    })
        e_mean[r] = total(sum) / width, e_moment[r] = total(moment) / width;
    }
    for (int r = 0; r < rows; ++r) {
        const float *in = x + r * width, *out = y + r * width, *from = gradient + r * width;
        const float mean = statistics[2 * r], factor = statistics[2 * r + 1];
        float *to = x_gradient + r * width;
        EACH_VECTOR(width, const real normed = (load(in, i, lanes, 0) - mean) * factor;
                    const bits passed = MASK(load(out, i, lanes, 0) > zero);
                    const real d = select(passed, load(from, i, lanes, 0), zero);
                    const real e = d * load(gain, i, lanes, 0);
                    const real to_x = (e - e_mean[r] - normed * e_moment[r]) * factor;
                    WRITE(to_x, to + i, lanes);)
    }
}

/* x, y and their gradients are [copies, rows, width], gain and bias [copies, width], `statistics`
 * [copies, rows, 2]. A thread takes whole copies, so that no sum depends on how many there are. */
#define EACH_ROWS(call) \
    PRAGMA(omp parallel for num_threads(threads) if(threads > 1)) \
    for (long long copy = 0; copy < copies; ++copy) \
        for (long long row = 0; row < rows; row += ROWS) { \
            const long long own = copy * width, first = copy * rows + row, at = first * width; \
            const int some = rows - row < ROWS ? (int)(rows - row) : ROWS; \
            call; \
        }

KERNEL norm_relu_forward(const float *x, const float *gain, const float *bias, float *y,
                         float *statistics, float epsilon, long long copies, long long rows,
                         long long width, long long threads) {
    EACH_ROWS(norm_relu(x + at, gain + own, bias + own, y + at, statistics + 2 * first, epsilon,
                        width, some))
}

KERNEL norm_relu_backward(const float *x, const float *gain, const float *y,
                          const float *statistics, const float *gradient, float *x_gradient,
                          float *gain_gradient, float *bias_gradient, long long copies,
                          long long rows, long long width, long long threads) {
    if (gain_gradient)
        EACH_ROWS(norm_relu_back(x + at, gain + own, y + at, statistics + 2 * first, gradient + at,
                                 x_gradient + at, gain_gradient + own, bias_gradient + own, width,
                                 some))
    else
        EACH_ROWS(norm_relu_back(x + at, gain + own, y + at, statistics + 2 * first, gradient + at,
                                 x_gradient + at, (float *)0, (float *)0, width, some))
}

#endif
