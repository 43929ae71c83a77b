/* The plan in words, as stored in a run file's /plan and printed by `info --plan`. Layer: plan (pure). */
#ifndef K3_PLAN_PLAN_TEXT_H
#define K3_PLAN_PLAN_TEXT_H

#include <stddef.h>

#include "plan/plan.h"

/* Writes what the planner chose, and why, into text (cut at size). */
void k3_plan_describe(const K3Plan *plan, const K3Config *config, const K3TensorTable *table, const K3Type *types,
                      char *text, size_t size);

#endif
