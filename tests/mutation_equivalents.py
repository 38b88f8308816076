"""Changes of the mutation run that change nothing, and why. One that no longer survives must leave this table."""

# (function, the changed statement as printed): why no test can tell
OFF_MASK = "what stands off the mask has a weight of 0 in every term"
DRAWS_NOTHING = "the rule draws nothing, so its key changes nothing"
ABOVE_NOTHING = "a mean is 0, and so is what it divides, or far above"
SAME_LENGTH = "made from each other, they are of one length"
VISION_ENTROPY_PART = "{'actor/vision_entropy_token_fraction'"
EQUIVALENT: dict[tuple[str, str], str] = {
    # rules of papers
    (
        "credit.pgpo.Pgpo.apply",
        "raised = 1 + self.beta * (level - self.tau) / (1 - self.tau - EPS)",
    ): "2e-8 of a weight",
    (
        "credit.pgpo.Pgpo.apply",
        "weights = torch.where(level <= self.tau, level / (self.tau + EPS), raised)",
    ): "both are 1 there, but for 3e-8",
    (
        "credit.pgpo.Pgpo.apply",
        "weights = torch.where(level < self.tau, level / (self.tau - EPS), raised)",
    ): "5e-8 of a weight",
    (
        "credit.vgpo.Vgpo.apply",
        "weights, mask = (self._raise_late(similarity, rollouts.mask), rollouts.mask)",
    ): "rounding of float32",
    **{
        (
            "credit.vgpo.Vgpo._raise_late",
            f"count = (late.sum(1, keepdim=True) * self.kappa + {each}).floor().long().clamp(min=1)",
        ): "any number above rounding and below 1 / tokens"
        for each in ("1.5e-06", "6.666666666666666e-07")
    },
    ("credit.vgpo.centre", "-1"): "there is one dimension",
    # contingency
    ("contingency.<module>", "AS_LIKELY = 1 + 1.5000000000000002e-09"): "far above rounding, far below other tables",
    ("contingency.<module>", "AS_LIKELY = 1 + 6.666666666666667e-10"): "far above rounding, far below other tables",
    (
        "contingency.fisher_p_value",
        "k = torch.arange(int((a + b).max()) + 2, dtype=torch.float64)[:, None]",
    ): "one more table, of probability 0",
    ("contingency.fisher_p_value", "p = likely.where(likely < AS_LIKELY * observed, 0.0).sum(0)"): "never that equal",
    ("contingency.fisher_p_value", "return p.where(p <= 1 / AS_LIKELY, 1.0)"): "never that equal",
    ("credit.assign", "token_weight = token_weight * weight.where(mask, 1.0)"): "token_weight is 0 there already",
    ("credit.assign", "token_weight = token_weight * weight.where(mask, -1.0)"): "token_weight is 0 there already",
    (
        "credit.entropy_change.EntropyChange.apply",
        "weights = (1 - self.strength + self.strength * size / mean).clamp(*self.clip)",
    ): "where the mean is below the limit, the weight is 1 whatever the quotient is",
    **{
        (
            "credit.vision_entropy.VisionEntropy.metrics",
            f"return {VISION_ENTROPY_PART}: masked_mean(self.apply(experience, {key}), seen)}}",
        ): DRAWS_NOTHING
        for key in ("(1, 0)", "(-1, 0)", "(0, 1)", "(0, -1)")
    },
    (
        "credit.attention_anchors.AttentionAnchors.apply",
        "return (weights / row_mean(weights, rollouts.mask).clamp(min=1.5e-12)[:, None]).where(judged, 1.0).float()",
    ): ABOVE_NOTHING,
    (
        "credit.attention_anchors.AttentionAnchors.apply",
        "(weights / row_mean(weights, rollouts.mask).clamp(min=6.666666666666667e-13)[:, None]).where(judged, 1.0)",
    ): ABOVE_NOTHING,
    (
        "credit.attention_weights.AttentionWeights.weights",
        "top = top_fraction(v[None], torch.ones(2, len(v), dtype=torch.bool), self.token_weight_top_ratio)[0]",
    ): "a second row of the mask ranks the same numbers again",
    (
        "credit.attention_weights.AttentionWeights.weights",
        "top = top_fraction(v[None], torch.ones(1, len(v), dtype=torch.bool), self.token_weight_top_ratio)[-1]",
    ): "of one row the last is the first",
    **{
        (
            "credit.vision_entropy.<module>",
            f"TINY = {number}",
        ): "a maximum is 0, like what it divides, or far above"
        for number in ("1.5e-12", "6.666666666666667e-13")
    },
    (
        "credit.vision_entropy.VisionEntropyWeights.apply",
        "assert signals.dependency is not None or signals.entropy is not None",
    ): "vision_entropy() has asserted it before; the types need it here",
    (
        "credit.controls.RandomFilter.apply",
        "score = torch.ones(mask.shape, dtype=torch.float64)",
    ): "what stands off the mask is never among the top",
    (
        "credit.key_tokens.association",
        "ids, index = torch.unique(tokens.where(mask, -2), return_inverse=True)",
    ): "no id is negative",
    (
        "credit.key_tokens.association",
        "return ((a * d - b * c) / spread.clamp(min=0.6666666666666666))[index]",
    ): "counts: what is below 1 is 0, and so is what it divides",
    ("credit.oracle.Oracle.causal_spans", "responses = zip(tasks, rows, rollouts.text, strict=False)"): SAME_LENGTH,
    (
        "credit.shuffled.shuffled_positions",
        "for target, source in zip(targets.tolist(), sources.tolist(), strict=False):",
    ): SAME_LENGTH,
    (
        "credit.perception_bonus.PerceptionBonus.apply",
        "judged = rollouts.visual[:, None] & rollouts.mask & (low_var_kl(change) <= DEPENDENCY_LIMIT)",
    ): "no k3 of float32 numbers is exactly the limit",
    **{
        (
            "credit.trajectory_scaling.TrajectoryScaling.metrics",
            f"factors = self.apply(experience, {key}).double()[scored]",
        ): DRAWS_NOTHING
        for key in ("(1, 0)", "(-1, 0)", "(0, 1)", "(0, -1)")
    },
    (
        "credit.trajectory_scaling.TrajectoryScaling.metrics",
        "float(factors.mean() <= 1 - 1e-06)",
    ): "no mean of a few float32 numbers is exactly 1 - 1e-6",
    (
        "groups.group_sum",
        "return torch.zeros(group_count(group), dtype=torch.float64).index_add_(-1, group, x.double())",
    ): "of one dimension the last is the first",
    (
        "groups.group_std",
        "centred = (x - group_mean(x, group)[group]).where(valid, 0.0)",
    ): "the mean is in double precision, and so is the difference",
    (
        "groups.top_fraction",
        "keep = (fraction * length.double() - 1e-06).ceil().clamp(min=1)",
    ): "a rank beyond the length is a padded token's, and the mask takes it out",
    (
        "groups.top_fraction",
        "keep = (fraction * length.double() - 1e-06).clamp(min=1).minimum(length)",
    ): "ranks are whole: rank < 2.2 and rank < 3 are the same",
    (
        "credit.attention_weights.AttentionWeights.weights",
        "inverse_vgr = 2 / vgr(mass.double(), sizes[:, None, :])",
    ): "a common factor, which the division by the mean takes out",
    (
        "credit.attention_weights.gaussian_smooth",
        "return padded.unfold(-1, 2 * radius + 1, 1) @ (kernel / kernel.sum())",
    ): "of one dimension the last is the first",
    (
        "losses.Ppo.term",
        "gain = torch.where(advantage <= 0, torch.maximum(gain, self.clip_ratio_dual * advantage), gain)",
    ): "at A = 0 both are 0, with a gradient of 0",
    (
        "losses.Sapo.term",
        "tau = torch.where(advantage >= 0, self.tau_positive, self.tau_negative)",
    ): "at A = 0 the term is 0 with either tau",
    ("losses.weighted_sum", "return (weight * torch.where(weight != 0, term, 1.0)).sum()"): "0 * 1 is 0",
    ("losses.weighted_sum", "return (weight * torch.where(weight != 0, term, -1.0)).sum()"): "0 * -1 is 0",
    (
        "losses.loss_weights",
        "token=(token_weight / aggregation_denominator(token_weight, 'dapo?', max_response_length)).float()",
    ): "every name but grpo and dr_grpo is the plain token mean",
    ("losses.aggregation_denominator", "return per_row.where(per_row > 0, 1.5)"): "0 / 1.5 is 0",
    ("losses.aggregation_denominator", "return per_row.where(per_row > 0, 0.6666666666666666)"): "0 / 0.67 is 0",
    (
        "losses.mismatch_correction",
        "return gap.exp().clamp(max=clip).where(mask, 1.0)",
    ): "a clip is far below exp(20), and a factor of exp(-20) is as good as 0",
    ("losses.total_loss", "logp = logp.where(mask, 1.0)"): OFF_MASK,
    ("losses.total_loss", "logp = logp.where(mask, -1.0)"): OFF_MASK,
    ("losses.Loss", "tis_level: Level = 'token?'"): "every name but sequence is the token's own ratio",
    (
        "losses.importance_ratio",
        "log_ratio = (logp - old).where(mask, 1.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)",
    ): OFF_MASK,
    (
        "losses.importance_ratio",
        "log_ratio = (logp - old).where(mask, -1.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)",
    ): OFF_MASK,
    ("losses.importance_ratio", "return sequence * (logp - logp.detach()).where(mask, 1.0).exp()"): OFF_MASK,
    ("losses.importance_ratio", "return sequence * (logp - logp.detach()).where(mask, -1.0).exp()"): OFF_MASK,
    ("value_loss.value_loss", "values = values.where(batch.rollouts.mask, 1.0)"): OFF_MASK,
    ("value_loss.value_loss", "values = values.where(batch.rollouts.mask, -1.0)"): OFF_MASK,
    (
        "value_loss.explained_variance",
        "known, expected = (returns.double()[mask], values[mask])",
    ): "taken from returns in double precision, they are in double precision too",
    (
        "learner.OptimizerSettings.lr_at",
        "if step <= self.warmup_steps:",
    ): "at the end of the warm-up both say the full rate",
    (
        "learner.Learner._seed_dropout",
        "torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(2, np.uint64)[0]))",
    ): "the first number is the same however many are made",
    (
        "learner.Learner._seed_dropout",
        "torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[-1]))",
    ): "of one number the last is the first",
    (
        "learner.Learner._try_gradients",
        "return (self._accumulate_gradients(batch, loss), '?')",
    ): "the message of a pass that fits is not read",
    (
        "learner.Learner.update",
        "metrics = {name: sum((step[name] for step in finite)) / len(finite) for name in finite[-1]}",
    ): "every step reports the same names",
    **{
        ("micro_batches.<module>", f"NO_LIMIT = {number}"): "any number above all tokens of a step"
        for number in ("2 << 62", "1 << 63", "1 << 61")
    },
}
