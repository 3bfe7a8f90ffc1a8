/* -- products -------------------------------------------------------------------------------- */

#if INT8
static int32_t sums[WIDEST];
#endif

#if !(ENCODED_SPIKES && MEMBRANE) /* else spikes enter every product */
#if INT8
/* out = bias + weight' x, x rounded to steps of `input_step`. Weights of an input of 0 are not read. */
static void product(const struct layer *l, const float *x, float *out)
{
    memset(sums, 0, sizeof sums);
    for (int i = 0; i < l->inputs; ++i) {
        float q = floorf(x[i] / l->input_step + 0.5f);
        q = q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q;
        const int32_t value = (int32_t)q;
        if (value == 0) continue;
        const int8_t *row = l->weight + i * l->outputs;
        for (int j = 0; j < l->outputs; ++j) sums[j] += value * row[j];
    }
    for (int j = 0; j < l->outputs; ++j)
        out[j] = l->bias[j] + (float)sums[j] * (l->weight_step[j] * l->input_step);
}
#else
/* out = bias + weight' x. Weights of an input of 0 are not read. */
static void product(const struct layer *l, const float *x, float *out)
{
    for (int j = 0; j < l->outputs; ++j) out[j] = l->bias[j];
    for (int i = 0; i < l->inputs; ++i) {
        const float value = x[i], *row = l->weight + i * l->outputs;
        if (value == 0.0f) continue;
        for (int j = 0; j < l->outputs; ++j) out[j] += value * row[j];
    }
}
#endif
#endif

#if STEPS

#if ENCODED_SPIKES || LAYERS > 2 || MEMBRANE
/* The same of spikes: the weights of those that came, added up. */
static void accumulate(const struct layer *l, const uint8_t *spikes, float *out)
{
#if INT8
    memset(sums, 0, sizeof sums);
    for (int i = 0; i < l->inputs; ++i) {
        const int8_t *row = l->weight + i * l->outputs;
        if (!spikes[i]) continue;
        for (int j = 0; j < l->outputs; ++j) sums[j] += row[j];
    }
    for (int j = 0; j < l->outputs; ++j)
        out[j] = l->bias[j] + (float)sums[j] * l->weight_step[j];
#else
    for (int j = 0; j < l->outputs; ++j) out[j] = l->bias[j];
    for (int i = 0; i < l->inputs; ++i) {
        const float *row = l->weight + i * l->outputs;
        if (!spikes[i]) continue;
        for (int j = 0; j < l->outputs; ++j) out[j] += row[j];
    }
#endif
}
#endif

/* -- neurons --------------------------------------------------------------------------------- */

static float voltages[NEURONS];
#if CURRENT_BASED
static float synapses[NEURONS];
#endif

/* One step of the neurons of a layer: charge, fire, reset to 0. */
static void fire(const struct layer *l, const float *current, uint8_t *spikes)
{
    float *v = voltages + l->first;
#if CURRENT_BASED
    float *c = synapses + l->first;
#endif
    for (int j = 0; j < l->outputs; ++j) {
#if CURRENT_BASED
        c[j] = c[j] * CURRENT_DECAY + current[j];
        const float h = v[j] * l->decay + c[j];
#elif DECAY_INPUT
        const float h = v[j] + (current[j] - v[j]) / l->decay;
#else
        const float h = v[j] - v[j] / l->decay + current[j];
#endif
        spikes[j] = h >= l->threshold;
        v[j] = spikes[j] ? 0.0f : h;
    }
}

#if FIELDS
/* Gaussian receptive fields, a row of them for each entry of the observation. */
static void encode(const float *x, float *activation)
{
    for (int i = 0; i < OBSERVATIONS * FIELDS; ++i) {
        const float distance = x[i / FIELDS] - field_mean[i], std = field_std[i];
        activation[i] = expf(-0.5f * (distance * distance) / (std * std));
    }
}
#endif

#endif

/* -- the policy ------------------------------------------------------------------------------ */

static int is_finite(float x) /* `finite` is taken in some C libraries */
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits & 0x7f800000u) != 0x7f800000u;
}

static float x[WIDEST], current[WIDEST];
#if STEPS
static float first[WIDEST];
static uint8_t spikes[WIDEST];
#if ENCODED_SPIKES
static float activation[WIDEST];
#endif
#endif

/* The mean before the tanh, of the observation in `x`, into `current`. */
static void mean(void)
{
    const struct layer *last = layers + LAYERS - 1;
#if STEPS
    memset(voltages, 0, sizeof voltages);
#if CURRENT_BASED
    memset(synapses, 0, sizeof synapses);
#endif
#if ENCODED_SPIKES
    encode(x, activation);
    memset(x, 0, sizeof x); /* from here on voltages of the fields */
#elif FIELDS
    encode(x, current);
    product(layers, current, first);
#else
    product(layers, x, first);
#endif
#if MEMBRANE
    float integrators[ACTIONS] = {0}, read[ACTIONS] = {0};
#else
    static uint8_t counts[WIDEST];
    memset(counts, 0, sizeof counts);
#endif
    for (int t = 0; t < STEPS; ++t) {
#if ENCODED_SPIKES
        for (int i = 0; i < OBSERVATIONS * FIELDS; ++i) {
            x[i] += activation[i];
            spikes[i] = x[i] > 0.999f;
            if (spikes[i]) x[i] -= 0.999f;
        }
        accumulate(layers, spikes, first);
#endif
        fire(layers, first, spikes);
#if LAYERS > 2
        for (const struct layer *l = layers + 1; l < last; ++l) {
            accumulate(l, spikes, current);
            fire(l, current, spikes);
        }
#endif
#if MEMBRANE
        accumulate(last, spikes, current);
        for (int j = 0; j < ACTIONS; ++j) {
            integrators[j] += (current[j] - integrators[j]) / MEMBRANE_TAU;
            if (MEMBRANE == LAST)
                read[j] = integrators[j];
            else if (MEMBRANE == MEAN)
                read[j] += integrators[j] / STEPS;
            else if (t == 0 || integrators[j] > read[j])
                read[j] = integrators[j];
        }
#else
        for (int i = 0; i < last->inputs; ++i) counts[i] = (uint8_t)(counts[i] + spikes[i]);
#endif
    }
#if MEMBRANE
    memcpy(current, read, sizeof read);
#else
    for (int i = 0; i < last->inputs; ++i) x[i] = (float)counts[i] / STEPS;
    product(last, x, current);
#endif
#else
    for (const struct layer *l = layers; l < last; ++l) {
        product(l, x, current);
        for (int j = 0; j < l->outputs; ++j) x[j] = current[j] > 0.0f ? current[j] : 0.0f;
    }
    product(last, x, current);
#endif
}

/* The deterministic policy. 0, or -1 where an observation is not finite: then `action` stays as it
 * is. Not re-entrant: working memory is static. */
int sansac_act(const float observation[OBSERVATIONS], float action[ACTIONS]);
int sansac_act(const float observation[OBSERVATIONS], float action[ACTIONS])
{
    for (int i = 0; i < OBSERVATIONS; ++i) {
        if (!is_finite(observation[i])) return -1;
#if NORMALIZED
        const float normed = (observation[i] - centre[i]) * scale[i];
        x[i] = normed < -CLIP ? -CLIP : normed > CLIP ? CLIP : normed;
#else
        x[i] = observation[i];
#endif
    }
    mean();
    for (int j = 0; j < ACTIONS; ++j) {
        const double share = (tanh((double)current[j]) + 1.0) * 0.5;
        action[j] = (float)((1.0 - share) * (double)low[j] + share * (double)high[j]);
    }
    return 0;
}

#ifdef SANSAC_PIPE
#include <stdio.h>

/* An observation a line in, an action a line out, or the word `rejected`. */
int main(void)
{
    float observation[OBSERVATIONS], action[ACTIONS];
    for (;;) {
        for (int i = 0; i < OBSERVATIONS; ++i)
            if (scanf("%f", observation + i) != 1) return !(i == 0 && feof(stdin));
        if (sansac_act(observation, action))
            puts("rejected");
        else
            for (int j = 0; j < ACTIONS; ++j)
                printf("%.9g%c", (double)action[j], j == ACTIONS - 1 ? '\n' : ' ');
        fflush(stdout);
    }
}
#endif
