/* Seconds since some fixed moment, never set back: for measuring spans. Floor 0. */
#ifndef TRAIN_MOE_CLOCK_H
#define TRAIN_MOE_CLOCK_H

#ifdef __cplusplus
extern "C" {
#endif

double clock_s(void);

#ifdef __cplusplus
}
#endif
#endif
